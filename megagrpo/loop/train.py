"""The loop. Everything it calls is built in run.py."""

from contextlib import ExitStack

from megagrpo.actor.step import update, with_logprobs
from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.kl import with_current_kl_coef
from megagrpo.batching.batch import shuffle_rewards
from megagrpo.batching.updates import plan_updates
from megagrpo.loop.evaluation import evaluate
from megagrpo.loop.run import Run
from megagrpo.monitor.metrics import Metrics, StepTimer


def train(run: Run) -> None:
    """GRPO from `run.state` to the last step. The published weights have version `state.step`;
    every rank runs this."""
    config, actor, mesh, state = run.config, run.actor, run.mesh, run.state
    temperature, max_tokens = config.sampling.temperature, config.sampling.max_response_tokens
    run.publish()  # returns only when these weights are verified in every engine
    run.log(evaluate(run))
    for step in range(state.step, run.num_steps + 1):
        timer, metrics = StepTimer(on_phase=run.enter), Metrics()
        with timer.phase("checkpoint"):
            run.save_on_schedule()  # the last step's record is on disk
        if run.stopping() or step == run.num_steps:  # asked to stop: saved, the next start goes on
            break
        with timer.phase("rollout"):
            sampled = run.next_groups(metrics)  # this rank's share: sampled, scored
        updates = plan_updates(config.train, config.seed, step)  # groups of each update and pass
        batch = run.build_batch(sampled, updates)  # samples balanced over ranks by cost
        if config.reward.shuffle:  # the control experiment: rewards without information
            batch = shuffle_rewards(batch, config.seed, step, mesh)
        algorithm = with_current_kl_coef(config.algorithm, state.algo_state)
        with timer.phase("logprobs"):
            batch = with_logprobs(actor, batch, algorithm, temperature)
        batch, algo_state, values = with_advantages(  # the all-reduce of group statistics
            batch, algorithm, mesh.reduce, state.algo_state, max_tokens
        )
        with timer.phase("update"):
            measured, logprobs = update(actor, batch, algorithm, temperature, max_tokens)
        values |= measured | metrics.reduced(mesh.reduce)
        run.inspect_update(batch, algorithm, values, logprobs)  # not finite: dumped; halt or go on
        run.finish_step(sampled, algo_state)
        with ExitStack() as end:
            end.callback(run.log, values, sampled.groups)  # also if one of these fails
            with timer.phase("publish"):
                values |= run.publish()
            with timer.phase("evaluate"):
                values |= evaluate(run)
            timer.record(metrics, batch.lengths.sum(), config.num_gpus)
            values |= metrics.reduced(mesh.reduce)
        del sampled, batch, logprobs  # the next step needs their memory
