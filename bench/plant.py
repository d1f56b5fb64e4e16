"""Plants faults, one at a time, and runs the tests that must find them.

    python bench/plant.py [--only TEXT]

Each fault replaces one line in a copy of the repository. A fault is found if a test that passes
without it fails with it; a fault that cannot be imported, or whose tests cannot start, counts as
not found. Exit status 1 unless all are. Writes bench/results/plant.{json,md}, not with --only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900
HEADER = ("fault", "file", "found by", "seconds")
LOSS, ADVANTAGE = (
    ("unit/test_algo_loss.py", "unit/test_algo_policy_loss.py"),
    ("unit/test_algo_advantage.py", "unit/test_algo_statistics.py"),
)
BATCH, DIGEST = ("unit/test_batch.py",), ("unit/test_weights_digest.py",)
ENDS, BESIDE = (
    "unit/test_launcher.py::test_no_later_request_or_signal_changes_how_a_stopped_run_ends",
    "unit/test_launcher.py::test_a_command_beside_a_run_has_an_experiment_of_its_own",
)
DRAFT, ROUNDING = ("dist/test_draft.py",), ("dist/test_fp8_engines.py",)


@dataclass(frozen=True)
class Fault:
    """A text that occurs once in a file of megagrpo/, its replacement, and the tests that must find
    it: files, or tests of a file as pytest names them."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "sign of the surrogate",
        "algo/policy_loss.py",
        "torch.maximum(-ratio * adv",
        "torch.maximum(ratio * adv",
        LOSS,
    ),
    Fault(
        "clip bounds swapped",
        "algo/policy_loss.py",
        "-ratio.clamp(low, high) * advantages)",
        "-ratio.clamp(2 - high, 2 - low) * advantages)",
        LOSS,
    ),
    Fault(
        "sequence ratio divided by all columns",
        "algo/policy_loss.py",
        "self.rows.sums(self.mask).clamp(min=1)",
        "self.rows.lengths.double()",
        LOSS,
    ),
    Fault(
        "mean of a sequence's advantages",
        "algo/policy_loss.py",
        "value = -advantages * (mean + clamped - clamped.detach()).exp()",
        "value = -inputs.sequence_mean(advantages) * inputs.sequence_mean(clamped).exp()",
        ("unit/test_distillation_losses.py::test_gmpo_learns_from_the_advantage_of_each_token",),
    ),
    Fault(
        "plain sum over the top k",
        "algo/loss.py",
        "gaps = gaps - p.exp() + q.exp()",
        "gaps = gaps * 1.0",
        ("unit/test_distillation_losses.py::test_the_teacher_is_where_distillation_ends",),
    ),
    Fault(
        "token-mean divided by sequences",
        "algo/loss.py",
        "return 1 / max(denominators.num_tokens, 1)",
        "return 1 / sequences",
        LOSS,
    ),
    Fault(
        "sign inside k3",
        "algo/kl.py",
        "expm1(-limited) + limited",
        "expm1(limited) - limited",
        LOSS,
    ),
    Fault(
        "correction from trainer to rollout reversed",
        "algo/advantage.py",
        "log_ratio = batch.old_logprobs - batch.rollout_logprobs",
        "log_ratio = batch.rollout_logprobs - batch.old_logprobs",
        ("unit/test_staleness.py", *ADVANTAGE),
    ),
    Fault(
        "std off by one",
        "algo/statistics.py",
        "(count - 1)",
        "(count + 0)",
        ADVANTAGE,
    ),
    Fault(
        "leave-one-out factor missing",
        "algo/estimators.py",
        "inputs.to_responses(factor) * _centered",
        "_centered",
        ADVANTAGE,
    ),
    Fault(
        "returns without discount",
        "algo/estimators.py",
        "num_tokens, factor = 1, gamma",
        "num_tokens, factor = 1, 1.0",
        ADVANTAGE,
    ),
    Fault(
        "mean of another group",
        "algo/estimators.py",
        "per_group.index_select(0, self.group_ids)",
        "per_group.roll(1).index_select(0, self.group_ids)",
        ADVANTAGE,
    ),
    Fault(
        "label of the same token",
        "batching/microbatch.py",
        "columns[flat] + 1)",
        "columns[flat])",
        BATCH,
    ),
    Fault(
        "label beyond the end",
        "batching/microbatch.py",
        "(columns + 1 < lengths",
        "(columns < lengths",
        BATCH,
    ),
    Fault(
        "zigzag part of a neighbor rank",
        "batching/microbatch.py",
        "2 * cp_size - 1 - cp_rank",
        "cp_size + cp_rank",
        BATCH,
    ),
    Fault(
        "the same order in every pass and step",
        "batching/updates.py",
        "updates {seed} {step} {number}",
        "updates {seed}",
        BATCH,
    ),
    Fault(
        "even multipliers",
        "weights/digests/digest.py",
        "_shift(x, 31)).bitwise_or_(1)",
        "_shift(x, 31)) & -2",
        DIGEST,
    ),
    Fault(
        "digest ignores where a shard starts",
        "weights/digests/digest.py",
        "_signed((start + (dim",
        "_signed(((dim",
        DIGEST,
    ),
    Fault(
        "digest of values instead of bits",
        "weights/digests/digest.py",
        "values.view(INTEGERS[values.element_size()])",
        "values.to(INTEGERS[values.element_size()])",
        DIGEST,
    ),
    Fault(
        "element offset of a shard",
        "weights/copies/storages.py",
        "(low - edge, high - low)",
        "(low - begin, high - low)",
        ("unit/test_weights_record.py",),
    ),
    Fault(
        "a stranger's message is believed",
        "weights/wire/mailbox.py",
        "if not hmac.compare_digest(value[:_MAC_BYTES], self._mac(name, data).encode()):",
        "if not data:",
        ("unit/test_weights_mailbox.py::test_digests_of_a_stranger_prove_nothing",),
    ),
    Fault(
        "sign of the router's bias",
        "actor/routing/bias.py",
        "experts * self.counts).sign()",
        "experts * self.counts).sign().neg()",
        ("dist/test_router_bias.py",),
    ),
    Fault(
        "scale of adapters missing",
        "models/layers/lora.py",
        "torch.cat(added, -1) * self.scale",
        "torch.cat(added, -1)",
        ("dist/test_actor_lora.py",),
    ),
    Fault(
        "sign of the draft's gradient",
        "algo/logprob.py",
        "draft_logits -= logits.sub_",
        "draft_logits += logits.sub_",
        ("unit/test_algo_logprob.py",),
    ),
    Fault(
        "draft pulled to its own position",
        "actor/head.py",
        "[follows.places[flat]]",
        "[flat]",
        DRAFT,
    ),
    Fault(
        "draft sees the present token",
        "models/kinds/draft/layer.py",
        "torch.where(found, every[places, 1], 0)",
        "torch.where(found, every[order, 1], 0)",
        DRAFT,
    ),
    Fault(
        "draft trains the model",
        "models/body.py",
        "self.draft(hidden.detach(), embedded",
        "self.draft(hidden, embedded",
        DRAFT,
    ),
    Fault(
        "draft in the model's norm",
        "models/kinds/draft/layer.py",
        "parameter.shared = True",
        "parameter.shared = False",
        DRAFT,
    ),
    Fault(
        "blocks of several ranks rounded by each rank's own maxima",
        "weights/quantized.py",
        "if self._mesh.world_size > 1:",
        "if self._mesh.world_size < 1:",
        ROUNDING,
    ),
    Fault(
        "a token at a sequence's start belongs to the one before",
        "tools/bisect/compare.py",
        "if flat < end)",
        "if flat <= end)",
        ("unit/test_bisect.py",),
    ),
    Fault(
        "a rejected draft may be drawn again",
        "cpu/engine/drafts.py",
        "rest[rejected, drafts[rejected, num_accepted[rejected]]] = 0.0",
        "rest[rejected, drafts[rejected, num_accepted[rejected]]] += 0.0",
        ("unit/test_drafts.py",),
    ),
    Fault(
        "the last test outlasts the time of all",
        "sandbox/grader.py",
        "min(settings.test_s, left_s)",
        "settings.test_s",
        ("unit/test_rewards_code.py::test_all_tests_share_one_time",),
    ),
    Fault(
        "the order of rows counts only for lower-case queries",
        "environments/sql.py",
        'by\\b", re.IGNORECASE)',
        'by\\b")',
        ("unit/test_sql.py",),
    ),
    Fault(
        "experts' state divided by ranks that hold other experts",
        "tools/plan/trainer_memory.py",
        "+ elements.trained_expert * p.etp * p.ep",
        "+ elements.trained_expert * p.etp",
        ("unit/test_planning_memory.py",),
    ),
    Fault(
        "what a worker started outlives it",
        "system/worker_process.py",
        "os.killpg(self._process.pid, signal.SIGKILL)",
        "os.kill(self._process.pid, signal.SIGKILL)",
        ("unit/test_rewards_pool.py::test_what_a_hung_grader_started_dies_with_it",),
    ),
    Fault(
        "a look counts from its end",
        "rollout/engine_choice.py",
        "self._looked = began",
        "self._looked = time.monotonic()",
        ("unit/test_engine_choice.py",),
    ),
    Fault(
        "as many samples as the other evaluation",
        "rollout/batches.py",
        "options.num_as_trained if as_trained else options.num_samples",
        "options.num_samples if as_trained else options.num_as_trained",
        (
            "unit/test_dispatch.py::test_each_evaluation_has_its_own_number_of_samples_and_temperature",
        ),
    ),
    Fault(
        "a checkpoint that is gone is not missed",
        "checkpoint/folder.py",
        'place.glob(f"{name}*")',
        'run.path.glob("*")',
        ("unit/test_checkpoint_places.py::test_the_newest_checkpoint_is_missed",),
    ),
    Fault(
        "restored groups of other leaders are saved twice",
        "rollout/batches.py",
        "% wanted in share",
        "% wanted >= 0",
        (
            "unit/test_batches.py::test_what_an_earlier_start_finished_goes_to_the_leader_whose_share_it_is",
        ),
    ),
    Fault(
        "the time of a step begins again with each publish",
        "rollout/source.py",
        "batch.deadline or until",
        "next_look",
        ("unit/test_rollout_client.py::test_the_time_of_a_step_goes_on_while_engines_get_weights",),
    ),
    Fault(
        "batches that a step has consumed stay in flight",
        "rollout/batches.py",
        "if not batch.consumed",
        "if batch.work is None or not batch.consumed",
        ("unit/test_batches.py::test_batches_ahead_are_planned_once_and_not_beyond_the_last_step",),
    ),
    Fault(
        "an error leaves the loop before the finished steps are saved",
        "loop/run.py",
        "if finished and self.actor.updates_done == self.updates_done:",
        "if self.state is None:",
        ("unit/test_dispatch.py::test_finished_steps_are_saved_unless_their_weights_are_gone",),
    ),
    Fault(
        "the learning rate ends as if all updates had been made by this start",
        "actor/start.py",
        "actor.num_updates = actor.updates_done + steps_left",
        "actor.num_updates = steps_left",
        (
            "unit/test_checkpoint.py::test_the_schedule_ends_with_the_last_step_whatever_was_made_before",
        ),
    ),
    Fault(
        "nulls inside lists stay",
        "data/messages.py",
        "return [plain(item) for item in value]",
        "return list(value)",
        ("unit/test_messages.py",),
    ),
    Fault(
        "an environment's words replace the whole conversation",
        "rollout/agents/renderer.py",
        "[*prompt[:-1], {**prompt[-1]",
        "[{**prompt[-1]",
        ("unit/test_whole_conversations.py",),
    ),
    Fault(
        "a judge reads the last message alone",
        "rewards/graders/judge.py",
        "prompt.transcript",
        "prompt.words",
        ("unit/test_rewards_services.py::test_the_judge_reads_the_whole_conversation",),
    ),
    Fault(
        "the words of an environment are trained",
        "rollout/agents/answering.py",
        "self.add(response, sampled=False)",
        "self.add(response, sampled=True)",
        ("unit/test_agents.py::test_a_rollout_is_one_sample_that_grows",),
    ),
    Fault(
        "a request undoes the grant before it",
        "system/stop_request.py",
        "        (self._final if final else self._made).touch()",
        "        self.withdraw()\n        (self._final if final else self._made).touch()",
        (ENDS,),
    ),
    Fault(
        "a launcher that exits dies of the next signal",
        "cluster/supervise.py",
        "        if not self._ask:\n            for",
        "        if True:\n            for",
        (ENDS,),
    ),
    Fault(
        "an export writes the run's experiment",
        "cluster/machine.py",
        'config.run_folder.logs / f"{name}.yaml"',
        "config.run_folder.config",
        (BESIDE,),
    ),
    Fault(
        "a function called like a service is not called",
        "rewards/pool.py",
        "entry.grader in _SERVICE_GRADERS:\n            return",
        "entry.short_name in self._services:\n            return",
        ("unit/test_rewards_pool.py::test_a_function_that_is_called_like_a_service_is_called",),
    ),
    Fault(
        "any text names a parser of tool calls",
        "config/rollout.py",
        'ToolParser = Literal[("", *names.split())]',
        "ToolParser = str",
        ("unit/test_tool_parsers.py::test_a_parser_that_sglang_does_not_have_is_refused",),
    ),
    Fault(
        "a tool that no parser reads turns calls into text",
        "rollout/agents/conversation.py",
        'str(tool["function"]["name"])',
        "str(tool)",
        ("unit/test_conversation.py::test_a_tool_that_no_parser_reads_is_the_agents_mistake",),
    ),
    Fault(
        "a parser that raises gives an empty message",
        "rollout/agents/parsers.py",
        "message |= parsed or {}",
        'message |= parsed or {"content": ""}',
        (
            "unit/test_tool_parsers.py::test_a_turn_that_no_parser_reads_is_its_text_and_holds_no_other",
        ),
    ),
    Fault(
        "a converted script sources any file",
        "tools/convert/shell.py",
        "if real.is_relative_to(within.resolve()) and real.is_file():",
        "if real.is_file():",
        ("unit/test_convert_shell.py",),
    ),
    Fault(
        "a program's answer counts as yes",
        "tools/convert/shell.py",
        "taken = _each(state, no)",
        "taken = _each(state, yes)",
        ("unit/test_convert_shell.py",),
    ),
    Fault(
        "the cache of latents is divided over ranks",
        "models/kinds/latent/describe.py",
        "        return self.kv_lora_rank + self.rope_dim\n",
        "        return (self.kv_lora_rank + self.rope_dim) // ranks\n",
        ("unit/test_plan_step.py",),
    ),
    Fault(
        "an indexer's key has no scales",
        "models/kinds/indexed/describe.py",
        " + self.head_dim // _SCALED * FP32",
        "",
        ("unit/test_sparse_attention.py",),
    ),
    Fault(
        "states of delta nets in the width of values",
        "models/kinds/recurrence.py",
        "self.state_size * FP32",
        "self.state_size * width",
        ("unit/test_recurrent_engines.py",),
    ),
    Fault(
        "a shared choice begins one layer late",
        "models/kinds/indexed/describe.py",
        "index + 1 - self.offset",
        "index - self.offset",
        ("unit/test_sparse_attention.py",),
    ),
    Fault(
        "a number at its default is a difference",
        "checkpoint/identity.py",
        "        if value != default:\n",
        "        if True:\n",
        ("unit/test_checkpoint_identity.py",),
    ),
    Fault(
        "an engine's ranks may cut a model anyhow",
        "check/rules/engine_layout.py",
        "yield Rule(cut.number % cut.ranks, because)",
        "yield Rule(False, because)",
        ("unit/test_config_explain.py",),
    ),
    Fault(
        "a stage may begin where it sees another's choice",
        "check/rules/trainer_layout.py",
        "if indexer.source(first) != first",
        "if False",
        ("unit/test_families_large.py",),
    ),
    Fault(
        "experts that every token meets have no cost",
        "models/kinds/experts/describe.py",
        "kept + shared.kept, transient, flops + shared.flops",
        "kept, transient, flops",
        ("unit/test_plan_step.py", "unit/test_planning_memory.py"),
    ),
    Fault(
        "peaks of a layer's parts add up",
        "models/costs.py",
        "max(self.transient, other.transient)",
        "self.transient + other.transient",
        ("unit/test_plan_step.py", "unit/test_planning_memory.py"),
    ),
    Fault(
        "a token meets all experts",
        "models/kinds/experts/describe.py",
        "return self.per_token / self.count",
        "return 1.0",
        ("unit/test_plan_step.py",),
    ),
    Fault(
        "a trainer's attention sends a sequence once",
        "models/kinds/grouped_query/describe.py",
        "at.gathers(2)",
        "at.gathers(1)",
        ("unit/test_families_qwen3_5.py::test_costs_of_both_kinds_of_layers",),
    ),
    Fault(
        "heads are divided by the ranks of the context",
        "models/kinds/attention.py",
        'self.heads, "tp", p.tp)',
        'self.heads, "tp", p.cp)',
        ("unit/test_config_explain.py",),
    ),
    Fault(
        "ranks with data-parallel attention have fewer heads",
        "check/rules/engine_layout.py",
        "attention_tp = max(tp // replicas, 1)",
        "attention_tp = tp",
        ("unit/test_engine_layout.py",),
    ),
    Fault(
        "an engine may begin on a full node",
        "check/rules/placement.py",
        "if used + part <= self.room)",
        "if used <= self.room)",
        ("unit/test_teachers.py::test_teachers_fill_the_rest_of_the_engines_nodes",),
    ),
    Fault(
        "a passing group is one with a passing first sample",
        "loop/evaluation.py",
        "comb(n - correct, k) / comb(n, k)",
        "comb(n - correct, 1) / comb(n, 1)",
        ("unit/test_metrics.py::test_an_evaluation_measures_samples_and_scores_rollouts",),
    ),
    Fault(
        "a stop request waits for the last step",
        "loop/train.py",
        "if run.stopping() or step == run.num_steps:",
        "if step == run.num_steps:",
        ("dist/test_loop_ends.py::test_an_evaluation_that_fails_or_is_stopped_costs_no_step",),
    ),
    Fault(
        "engines with older weights go on",
        "rollout/source.py",
        'engine.alive and (engine.state == "stale" or engine.weight_version != version)',
        'engine.alive and engine.state == "stale"',
        ("unit/test_rollout_client.py",),
    ),
    Fault(
        "a seed that orders nothing is an order",
        "checkpoint/changes.py",
        "if data.shuffle:",
        "if True:",
        ("unit/test_checkpoint_changes.py",),
    ),
    Fault(
        "the settings of a step that is made again are those before",
        "checkpoint/changes.py",
        "if file < path:",
        "if file <= path:",
        ("unit/test_checkpoint_changes.py",),
    ),
    Fault(
        "another process with a launcher's number is the launcher",
        "cluster/lock.py",
        'self.is_here and self.started == _started(self.pid) != ""',
        'self.is_here and _started(self.pid) != ""',
        ("unit/test_lock.py",),
    ),
    Fault(
        "a launcher elsewhere runs for as long as its file is new",
        "cluster/lock.py",
        "        if _last_beat(path) != first:\n",
        "        if True:\n",
        ("unit/test_lock.py",),
    ),
    Fault(
        "an export reads a checkpoint that was cut short",
        "tools/ranks/export.py",
        "require_finished(Path(source))",
        "assert Path(source).is_dir()",
        ("unit/test_rank_commands.py",),
    ),
)


def planted(fault: Fault, root: Path = ROOT) -> str:
    """Returns the file's text with the fault. Raises ValueError unless its text occurs exactly
    once."""
    text = (root / "megagrpo" / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in "
            f"megagrpo/{fault.file}"
        )
    return text.replace(fault.old, fault.new)


def first_failure(copy: Path, tests: Iterable[str]) -> str | None:
    """Runs tests in a copy; returns the first one that fails, None if all pass. AssertionError for
    other ends."""
    files = [str(Path("tests") / test) for test in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *files,
    ]
    variables = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=copy,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    failed = re.search(r"^FAILED tests/(\S+)", done.stdout, re.M)
    assert (done.returncode == 0) != (done.returncode == 1 and failed is not None), (
        done.stdout[-2000:] + done.stderr
    )
    return failed[1] if failed else None


def copy_of_repository(folder: Path) -> Path:
    """Copies all files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def measure(fault: Fault, copy: Path) -> dict:
    """Returns the fault's row; `found_by` is None if no test failed."""
    file, started = copy / "megagrpo" / fault.file, time.monotonic()
    right = file.read_text()
    file.write_text(planted(fault))
    try:
        found_by, problem = first_failure(copy, fault.tests), ""
    except (AssertionError, subprocess.TimeoutExpired) as exc:
        found_by, problem = None, str(exc)[-500:]
    finally:
        file.write_text(right)
    row = asdict(fault) | {
        "found_by": found_by,
        "problem": problem,
        "seconds": time.monotonic() - started,
    }
    print(f"{fault.name}: {found_by or 'NOT FOUND ' + problem}", flush=True)
    return row


def main(faults: Iterable[Fault] = FAULTS, result: str = "plant") -> int:
    """Plants the faults and writes bench/results/<result>.{json,md}; returns the exit status."""
    from common import provenance, write_results

    parser = argparse.ArgumentParser(description=f"Plants faults; writes {result}.md")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="faults with this in their name or file"
    )
    args = parser.parse_args()
    faults = [fault for fault in faults if args.only in f"{fault.name} {fault.file}"]
    with tempfile.TemporaryDirectory(prefix="plant-") as folder:
        copy = copy_of_repository(Path(folder))
        tests = sorted({test for fault in faults for test in fault.tests})
        for part in (
            "dist/",
            "unit/",
            "hostcuda/",
        ):  # one after the other: they have files of the same name
            own = [test for test in tests if test.startswith(part)]
            failing = first_failure(copy, own) if own else None
            assert failing is None, f"{failing} fails without a fault"
        rows = [measure(fault, copy) for fault in faults]
    found = sum(row["found_by"] is not None for row in rows)
    print(f"{found} of {len(rows)} found")
    if not args.only:
        lines = [
            (
                row["name"],
                f"`{row['file']}`",
                f"`{row['found_by']}`" if row["found_by"] else "NOT FOUND",
                f"{row['seconds']:.0f}",
            )
            for row in rows
        ]
        write_results(result, {**provenance(), "found": found, "rows": rows}, HEADER, lines)
    return 0 if found == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
