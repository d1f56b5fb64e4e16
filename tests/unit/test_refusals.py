"""Settings that do not go together are refused with the reason. test_config_load.py has what an error looks like."""

import re

import pytest

from megagrpo.config.load import ConfigError
from tests.experiments import ROOT, read_experiment

COLOCATED = ["rollout.colocate=true", "weights.transport=ipc"]
FP8 = ["rollout.quantization=fp8", "rollout.dtype=bfloat16"]
REPLAY = "actor.routing_replay=rollout"
TIS = "algorithm.mismatch.weight={name: tis}"
BY_VERSION = ["rollout.prefix_cache=by_version", "rollout.max_staleness=1"]
PLAYED = ["reward={}", "sampling.environment={function: 'tests.games:Walk', episode_timeout_s: 100}"]
DYNAMIC = ["actor.parallel={cp: 2, dynamic_context: true}", "actor.world_size=2"]
REFUSED = [  # settings over configs/quickstart.yaml, part of the reason
    # routers and adapters
    ([*PLAYED, "sampling.environment.credit=turn"], "credit turn with advantage grpo, which reads only the sum"),
    (["actor.router_losses={balance: 0}"], "balance and z are both 0; set one, or remove router_losses"),
    (["actor.router_losses={z: -1}"], "actor.router_losses.z = -1"),
    (["actor.router_losses={z: 1}", "actor.lora.rank=4"], "their biases too; remove router_losses"),
    (["actor.router_bias_update=0.001", "actor.lora={rank: 4}"], "remove router_bias_update"),
    (
        ["algorithm.loss={name: 'a.py:f', clip: 0.2}"],
        "loss.clip = 0.2: unknown key; an argument of your own function is",
    ),
    (["algorithm.advantage={name: 'a.py:f', argz: 2}"], "unknown key; did you mean 'args'?"),
    (["teachers={own: {path: m, foo: 1}}"], "teachers.own.foo = 1: unknown key; known: path, "),
    (["actor.lora={targets: [q_prj]}"], "actor.lora.targets.0 = 'q_prj': not a choice; did you mean 'q_proj'?"),
    (["actor.lora={targets: [q_proj, q_proj]}"], "actor.lora.targets: names q_proj twice"),
    (["actor.lora={targets: []}"], "actor.lora.targets = []"),
    (["actor.lora={rank: 0}"], "actor.lora.rank = 0: should be greater than or equal to 1"),
    (["actor.lora={alpha: 0}"], "actor.lora.alpha = 0"),
    (["actor.lora.rank=4", "actor.transformer_engine=true"], "lora adds to Megatron's own linear layers"),
    # micro-batches that take some of the context-parallel ranks
    (["actor.parallel.dynamic_context=true"], "halves the context-parallel ranks, and cp is 1; let cp be 2, 4, 8"),
    (
        ["actor.parallel={cp: 3, dynamic_context: true}", "actor.world_size=3"],
        "halves the context-parallel ranks, and cp is 3",
    ),
    ([*DYNAMIC, "actor.packing=false"], "and packing is off; set packing: true"),
    (
        [*DYNAMIC, "train.num_updates_per_step=2", "algorithm.kl={estimator: full, loss_coef: 0.1}"],
        "need actor.packing: true without parallel.dynamic_context",
    ),
    (["actor.megatron={hybrid_context_parallel: true}"], "actor.parallel.dynamic_context"),
    (
        [
            *("algorithm.old_logprobs=engine", "algorithm.kl={estimator: k3+, importance: true}"),
            *("algorithm.streams=[{component: reference_kl, written_by: [data]}]", "data.demonstration_key=answer"),
        ],
        "algorithm.kl.importance with old_logprobs engine, which has none of tokens",
    ),
    # tokens that a loss chooses
    (["algorithm.loss={name: clip_cov, low: 5}"], "low 5.0 and high 5.0 have no covariance between them"),
    (["algorithm.loss={name: kl_cov}", "train.num_updates_per_step=1"], "it is the policy gradient alone"),
    (["algorithm.loss={name: kl_cov}", "algorithm.distillation={}"], "reverse_kl has advantages of its own"),
    # the engine's experts
    (["actor.routing_replay=old", "train.num_updates_per_step=1"], "old changes nothing with one update a step"),
    (
        ["actor.routing_replay=old", "train.num_updates_per_step=2", "algorithm.old_logprobs=engine"],
        "no forward before the updates that could record experts; set it to rollout",
    ),
    ([REPLAY, "actor.megatron={moe_router_fusion: true}"], "the fused kernel chooses experts by itself"),
    ([REPLAY, "rollout.sglang={chunked_prefill_size: -1}"], "chunked_prefill_size -1: SGLang keeps the experts"),
    ([REPLAY, "rollout.sglang={enable_two_batch_overlap: true}"], "enable_two_batch_overlap, which overwrites the"),
    (
        [REPLAY, "rollout.sglang={enable_hierarchical_cache: true, hicache_size: 8}"],
        "which returns another token's experts",
    ),
    (["rollout.sglang={enable_return_routed_experts: true}"], "is set by actor.routing_replay: rollout"),
    (["actor.megatron={moe_enable_routing_replay: true}"], "actor.routing_replay"),
    # engines in FP8
    ([*FP8, "rollout.load_format=model"], "quantization fp8 with load_format model"),
    ([*FP8, "cluster.gpu=B200", "actor.device=cuda"], "rollout.quantization fp8 with cluster.gpu B200"),
    ([*FP8, "rollout.dtype=float32"], "rollout.quantization fp8 with rollout.dtype float32"),
    # engines beside trainers
    (
        ["rollout.colocate=true", "weights.transport=broadcast"],
        "weights.transport broadcast: NCCL takes no two ranks on one GPU",
    ),
    ([*COLOCATED, "weights.transport=reshard"], "set weights.transport: ipc, or disk"),
    # older weights
    (["rollout.max_staleness=2"], "max_staleness 2 trains on tokens of older weights"),
    (["rollout.max_staleness=1", TIS, "algorithm.dynamic_sampling={}"], "take 2 or more, or 0"),
    (["weights.in_flight=in_place"], "'in_place' is 'retract' here"),
    (["rollout.prefix_cache=by_version"], "by_version without max_staleness"),
    (BY_VERSION, "needs a correction"),
    ([*BY_VERSION, "rollout.deterministic=true", TIS], "what caches still hold"),
    # rewards, environments, data
    (["reward={grader: exact, graders: [{grader: format}]}"], "grader and graders are both set; write one of them"),
    (["reward={graders: [{grader: exact}, {grader: exact}]}"], "two are named exact; give each a name of its own"),
    (["reward={graders: [{grader: exact, name: 'Exact!'}]}"], "should match pattern"),
    (["weights.timeout_s=1800"], "weights.timeout_s 1800 must be below actor.deadline_s 1800: other ranks wait"),
    (
        ["rollout.colocate=true", "weights.transport=ipc", "rollout.start_timeout_s=3600"],
        "rollout.start_timeout_s + rollout.health_timeout_s 3900 must be below actor.deadline_s 1800",
    ),
    (["reward={group_args: {x: 1}}"], "group_args without group_grader"),
    (["reward={graders: [{grader: http, args: {url: nowhere}}]}"], "should look like http://host:port/path"),
    (["reward.group_grader=rank", "algorithm.advantage={name: remax}"], "its greedy baseline has no group"),
    ([*PLAYED, "reward={grader: exact}"], "the reward is given by sampling.environment; remove the graders"),
    ([*PLAYED, "algorithm.advantage={name: remax}"], "it needs a greedy response"),
    ([*PLAYED, "rollout.step_timeout_s=99"], "episode_timeout_s 100 must be below rollout.step_timeout_s 99"),
    (
        ["reward={}", "sampling.agent={command: [cat], timeout_s: 600}", "rollout.step_timeout_s=600"],
        "sampling.agent.timeout_s 600 must be below rollout.step_timeout_s 600, which ends the run, not a rollout",
    ),
    (
        ["reward={}", "sampling.environment={function: python, args: {run_s: 30}}"],
        "args.run_s 30 must be some seconds below timeout_s 30,",
    ),
    (
        ["reward={}", "sampling.environment={function: mcp, timeout_s: 20}"],
        "args.timeout_s 14.0 must be some seconds below timeout_s 20, mcp's below half of it,",
    ),
    (
        ["reward={}", "sampling.environment={function: sql, args: {max_steps: 6000000}}"],
        "args.max_steps 6000000 must be some seconds below timeout_s 30,",
    ),
    (
        ["sampling.environment={function: 'a:b', episode_timeout_s: 30}"],
        "episode_timeout_s 30.0 must be above timeout_s",
    ),
    (["data={path: a.jsonl, sources: [{source: a, path: a.jsonl}]}"], "path and sources"),
    (["data={sources: [{source: a, path: a}, {source: a, path: b}]}"], "'a' is there twice"),
    (["data={sources: [{source: a, path: a, ratio: 1.0}, {source: b, path: b}]}"], "1 of 2 have a"),
    (["data={}"], "path names no file"),
    (["output_dir=$NOT_SET_HERE/run"], "'$NOT_SET_HERE/run' names a variable that is not set"),
    (["data.path="], "path names no file"),
    (["data.prompt_template=Think."], "prompt_template without {prompt}"),
    (["data={sources: [{source: a, path: a.jsonl, prompt_template: Think.}]}"], "prompt_template without {prompt}"),
    (["data={sources: [{source: a, path: a.jsonl, system_prompt: Be brief.}]}"], "system_prompt needs chat_template"),
    (["data={path: a, grader_by_source: {a: exact}}"], "needs source_key"),
    (["data={path: a, grader_key: g, source_key: s, grader_by_source: {a: exact}}"], "both choose"),
]
REFUSED_DRAFTS = [  # over configs/quickstart_draft.yaml
    (["actor.draft=null"], "rollout.draft_tokens without actor.draft"),
    (["actor.lora={}"], "adapters of the model, not the draft; remove draft"),
    (["rollout.sglang={speculative_num_steps: 3}"], "is set by rollout.draft_tokens"),
    (["rollout.sglang={speculative_draft_model_path: x}"], "a publish reaches no other draft"),
    ([REPLAY, "rollout.max_running_requests=1024"], "may read 3072 tokens"),
]
ROWS = [("quickstart", *row) for row in REFUSED] + [("quickstart_draft", *row) for row in REFUSED_DRAFTS]


@pytest.mark.verifies("runs", "`check`, `plan`, `submit --dry-run` refuse the same in the same words")
@pytest.mark.parametrize(("config", "settings", "said"), ROWS)
def test_settings_that_do_not_go_together(config: str, settings: list[str], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_experiment(ROOT / "configs" / f"{config}.yaml", settings)
