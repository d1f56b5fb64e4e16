"""The loop. Everything it calls is built in run.py."""

from megagrpo.actor.step import update, with_logprobs
from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.kl import with_current_kl_coef
from megagrpo.batching.batch import shuffle_rewards
from megagrpo.batching.updates import plan_updates
from megagrpo.evaluation import evaluate
from megagrpo.monitor.metrics import Metrics, StepTimer
from megagrpo.run import Run


def train(run: Run) -> None:
    """GRPO from `run.state` to the last step. The published weights have version `state.step`;
    every rank runs this."""
    config, actor, mesh, state = run.config, run.actor, run.mesh, run.state
    temperature, max_tokens = config.sampling.temperature, config.sampling.max_response_tokens
    run.publish()  # returns only when these weights are verified in every engine
    run.log(evaluate(run))
    for step in range(state.step, run.num_steps):
        timer, metrics = StepTimer(on_phase=run.enter), Metrics()
        with timer.phase("checkpoint"):
            # after a step whose samples and metrics are on disk: a resumed run has them all
            run.checkpoint()
        if run.stopping():  # pre-emption or the time limit: saved, and continued by the next start
            break
        with timer.phase("rollout"):
            groups = run.next_groups(metrics)  # this rank's share: sampled, scored
        # the groups of each optimiser update, over all passes
        updates = plan_updates(config.train, config.seed, step)
        batch = run.build_batch(groups, updates)  # samples balanced over ranks by cost
        if config.reward.shuffle:  # the control experiment: rewards without information
            batch = shuffle_rewards(batch, config.seed, step, mesh)
        algorithm = with_current_kl_coef(config.algorithm, state.algo_state)
        with timer.phase("logprobs"):
            old = batch.num_updates > 1 or algorithm.needs_old_logprobs
            reference_kl = algorithm.kl.estimator if algorithm.uses_reference else None
            batch = with_logprobs(actor, batch, temperature, old, reference_kl)
        # the all-reduce of group statistics
        batch, state.algo_state, values = with_advantages(
            batch, algorithm, mesh.reduce, state.algo_state, max_tokens
        )
        with timer.phase("update"):
            measured, logprobs = update(actor, batch, algorithm, temperature, max_tokens)
        values |= measured
        # an update that was not finite: dumped; halt or go on
        run.inspect_update(batch, algorithm, values, logprobs)
        state.step += 1
        with timer.phase("publish"):
            values |= run.publish()
        with timer.phase("evaluate"):
            values |= evaluate(run)
        timer.record(metrics, batch.lengths.sum())
        run.log(values | metrics.reduced(mesh.reduce), groups)
    run.checkpoint()
