"""SIGKILL of every process of a run, one after the other: training goes on, and nothing is left at the end."""

import os
import re
import signal

from harness import FAULT, PENDULUM, TINY, Run, poll, shared_memory, train

from spreeze.transport.checkpoint import CheckpointStore

_LIVELY = ("--set", "learner.checkpoint_interval_s=0.5", "--set", "visualizer.enabled=true",
           "--set", "learner.publish_interval_s=0.1")  # fmt: skip


def _kill_and_see_it_again(run, name):
    victim = run.wait_for(lambda: run.children().get(name), what=f"{name} to be there")
    version, restarts = run.version(), run.numbers().get("restarts", 0)
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for(
        lambda: run.children().get(name) not in (None, victim) and run.numbers()["restarts"] > restarts,
        what=f"another {name}",
    )  # fmt: skip
    run.until_progress()
    assert run.version() > version
    assert any(f"{name} ended by SIGKILL" in event for event in run.events())


def test_every_role_is_killed_in_turn_and_training_goes_on(tmp_path):
    tiny = [word for word in TINY if word != "--no-visualizer"]
    prioritised = ("--set", "sac.priority_exponent=0.6")  # what the learner knows of rows dies with it
    with Run(tmp_path, *FAULT, *_LIVELY, *prioritised, "--samplers", "2", tiny=tiny) as run:
        run.until_updates(100)
        store = CheckpointStore(run.path / "checkpoints")
        run.wait_for(store.paths, what="a first checkpoint")
        _kill_and_see_it_again(run, "sampler-0")
        epoch, saved = run.version()[0], store.load_latest().updates
        _kill_and_see_it_again(run, "learner")
        assert run.version()[0] > epoch, "a restarted learner starts a new epoch of versions"
        (again,) = [event for event in run.events() if "learner continues from update" in event]
        assert int(re.search(r"from update (\d+)", again)[1]) >= saved > 0, (
            "from the last checkpoint and not from nothing"
        )
        _kill_and_see_it_again(run, "evaluator")
        _kill_and_see_it_again(run, "visualizer")
        code, document = run.stop()
        assert code == 0
        assert document["restarts"] == 4
        assert document["error"] is None
        assert run.nonce_processes() == []


def test_killed_supervisor_takes_all_workers_along_and_the_next_start_works(tmp_path):
    shared = shared_memory()
    with Run(tmp_path, *PENDULUM, "--set", "learner.checkpoint_interval_s=0.5") as run:
        run.until_updates(50)
        workers = run.children().values()
        assert len(workers) == 3
        run.process.kill()
        run.process.wait()
        poll(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers),
             what="all workers gone")  # fmt: skip
        assert run.nonce_processes() == []
        assert shared_memory() == shared
    _, code, document = train(tmp_path, "--resume", "run", "--updates", "60", tiny=("--no-visualizer",))
    assert code == 0
    assert document["updates"] >= 60


def test_workers_heed_no_signal_that_asks_to_end_and_yet_end_with_their_supervisor(tmp_path):
    with Run(tmp_path, *FAULT, "--set", "visualizer.enabled=true") as run:
        run.until_updates(50)
        workers = run.wait_for(lambda: len(run.children()) == 4 and run.children(), what="four workers")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            for worker in workers.values():
                worker.send_signal(number)
        for _ in range(2):
            run.until_progress()
        assert run.children() == workers, "the very same processes"
        assert run.numbers()["restarts"] == 0
        run.process.kill()
        run.process.wait()
        poll(lambda: run.nonce_processes() == [], what="all workers gone")


def test_killed_group_leaves_nothing(tmp_path):
    shared = shared_memory()
    with Run(tmp_path, *FAULT) as run:
        run.wait_for(lambda: len(run.children()) == 3, what="three workers")
        run.wait_for(lambda: all(process.name() == name for name, process in run.children().items()), what="names")
        workers = list(run.children().values())
        for pid in [worker.pid for worker in workers] + [run.process.pid]:
            os.kill(pid, signal.SIGKILL)
        run.process.wait()
        poll(lambda: run.nonce_processes() == [], what="all workers gone")
        assert shared_memory() == shared
