"""The real sampler against a bare environment loop, and updates/s of the whole learner by batch size."""

import argparse

from common import main
from figures import Row
from learner_rates import learner_rows
from sampler_cost import sampling_rows, task_plan


def sampling(args: argparse.Namespace) -> list[Row]:
    """Env steps/s of the sampler and of the bare loop with the same actions."""
    plan = task_plan(
        args.env,
        envs_per_sampler=args.envs_per_sampler or None,
        import_module=args.module or None,
        plain=args.plain_env,
        env_args=args.env_arg,
    )
    return sampling_rows(plan, args.repeats, args.seconds)


def learner(args: argparse.Namespace) -> list[Row]:
    """Updates/s by batch size, on a device or a split such as cuda:0, split or cpu+cpu."""
    how = {name: getattr(args, name) for name in ("threads", "precision", "overlap", "updates_per_launch")}
    return learner_rows(args.batch_size, args.repeats, args.device, args.algo, **how)


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"sampling": sampling, "learner": learner},
        flags={
            "envs_per_sampler": 0,
            "module": "",
            "plain_env": False,
            "env_arg": [],
            "batch_size": (256,),
            "algo": "sac",
            "device": "cpu",
            "threads": 1,
            "precision": "float32",
            "overlap": False,
            "updates_per_launch": 1,
        },
        env="Walker2DBulletEnv-v0",
        seconds=3.0,
    )
