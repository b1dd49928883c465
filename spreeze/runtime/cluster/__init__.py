"""Other hosts, through Ray: Ray does placement, restarts and transfers; all else is as on one machine.

In mode spreeze they have samplers; where learners mix they have whole runs, whose learners join those of this one.

``bridge``           (driver) base of the worker process that has the connection to Ray. A crash of Ray ends it alone.
``row_bridge``       asks each host for chunks of rows, writes them into the run's replay, and sends weights.
``learner_bridge``   in place of that where learners mix: carries messages between hosts.
``host``             the Ray actor, one on every other host: answers the bridge, has that host's samplers or its run.
``ray_nodes``        all calls of Ray; a survey of what a cluster has, for ``spreeze doctor``.

*Flow.* At most two pulls are in progress to a host. A pull is answered with a chunk (``transport.chunks``) of 1 to 4
MB, or sooner with what there is. It carries how far the host may continue by the run's rate limiter: so back-pressure
reaches the samplers. Each version of the weights is one object in Ray's store, which every host fetches once.

*Faults.* A restarted gateway has a new ring and numbers its rows anew; what was in progress is lost, and counted. A
host that does not answer is waited for; one that Ray counts as dead is dropped, and taken in again when it comes back.
When the bridge ends, Ray ends its actors, and samplers end with the process that started them.

*Trust.* Ray runs any code that a member of its cluster sends, so its token authentication (``RAY_AUTH_MODE=token``) is
on in clusters that are made here. This package sends ``bytes`` alone, which Ray does not pickle; of our code Ray
pickles only the name of the actor's class. Every message bears an HMAC with the run's secret.
"""
