"""Drafts: the stand-ins for SGLang's kernels, the attention of a chain, what is counted, what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch

from megagrpo.algo.statistics import alone
from megagrpo.cpu.engine import drafts
from megagrpo.models.folder import Model
from megagrpo.models.table import architecture_of, is_left_out, left_out, model_tensors
from megagrpo.monitor.metrics import Metrics
from megagrpo.rollout.response import CacheUse, Response
from tests.experiments import ROOT

CHAIN, WORDS = 3, 5


def verified(sampler, candidates: torch.Tensor, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [bs, n] with -1 after the last one, number of accepted drafts [bs])."""
    size = len(candidates)
    predicts = torch.full((size * CHAIN,), -1, dtype=torch.int32)
    index = torch.full((size, CHAIN), -1, dtype=torch.int32)
    number = torch.empty(size, dtype=torch.int32)
    tree = {"retrive_index": None, "retrive_next_token": None, "retrive_next_sibling": None}
    sampler(
        predicts=predicts, accept_index=index, accept_token_num=number, candidates=candidates, **tree, **inputs
    )  # fmt: skip
    places = torch.arange(size * CHAIN).view(size, CHAIN)
    kept = torch.arange(CHAIN) <= number[:, None]
    assert torch.equal(index.long(), torch.where(kept, places, -1))
    return torch.where(kept, predicts.view(size, CHAIN), -1), number


def test_greedy_drafts_are_accepted_up_to_the_first_wrong_one():
    target = torch.tensor([[4, 2, 1]] * 4)
    candidates = torch.tensor([[9, 4, 2], [9, 4, 3], [9, 0, 2], [9, 0, 0]])
    tokens, number = verified(drafts.verify_tree_greedy_cpu, candidates, target_predict=target)
    assert number.tolist() == [2, 1, 0, 0]
    assert tokens.tolist() == [[4, 2, 1], [4, 2, -1], [4, -1, -1], [4, -1, -1]]


def test_sampled_chains_have_exactly_the_distribution_of_the_model():
    """Frequencies of whole outcomes against their probabilities; the error of 400,000 draws is at most 0.0008."""
    draw, size = torch.Generator().manual_seed(0), 400_000
    rows = torch.randn(CHAIN, WORDS, generator=draw).mul(1.5).softmax(-1)
    candidates = torch.tensor([0, 3, 1]).expand(size, -1)
    tokens, number = verified(
        drafts.tree_speculative_sampling_target_only, candidates,
        uniform_samples=torch.rand(size, CHAIN, generator=draw),
        uniform_samples_for_final_sampling=torch.rand(size, generator=draw),
        target_probs=rows.expand(size, -1, -1), draft_probs=None,
    )  # fmt: skip
    accepted = [float(rows[0, 3]), float(rows[1, 1])]
    first, second, third = (torch.bincount(tokens[:, i] + 1, minlength=WORDS + 1)[1:] / size for i in range(CHAIN))
    assert torch.allclose(first, rows[0], atol=0.003)
    assert torch.allclose(second, accepted[0] * rows[1], atol=0.003)
    assert torch.allclose(third, accepted[0] * accepted[1] * rows[2], atol=0.003)
    assert set(tokens[number == 0, 0].tolist()) == {0, 1, 2, 4}, "a rejected draft is not drawn again"


def test_impossible_tokens_are_never_sampled_and_certain_ones_always():
    probabilities = torch.tensor([[[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]]])
    for coin in (0.0, 0.5, 1.0 - 2.0**-24):
        tokens, number = verified(
            drafts.tree_speculative_sampling_target_only, torch.tensor([[0, 2, 4]]),
            uniform_samples=torch.full((1, CHAIN), coin), uniform_samples_for_final_sampling=torch.tensor([coin]),
            target_probs=probabilities, draft_probs=None,
        )  # fmt: skip
        assert number.tolist() == [1] and tokens[0, 0] == 2 and tokens[0, 1] in (1, 3)


def test_probabilities_are_cut_to_the_likely_tokens():
    probabilities = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2]])
    few = drafts.top_k_renorm_prob(probabilities, torch.tensor([1, 3], dtype=torch.int32))
    assert torch.allclose(few, torch.tensor([[1.0, 0.0, 0.0, 0.0], [4 / 9, 0.0, 3 / 9, 2 / 9]]))
    most = drafts.top_p_renorm_prob(probabilities, torch.tensor([0.5, 1.0]))
    assert torch.allclose(most, torch.tensor([[4 / 7, 0.0, 3 / 7, 0.0], [0.4, 0.1, 0.3, 0.2]]))


def test_trees_and_biased_thresholds_are_refused():
    with pytest.raises(NotImplementedError, match="speculative_eagle_topk is 2"):
        drafts.build_tree_kernel_efficient_cpu(*[None] * 8, 2, 1, 4, 1)
    with pytest.raises(NotImplementedError, match=r"thresholds of acceptance 0\.9, 1\.0"):
        drafts.tree_speculative_sampling_target_only(*[None] * 11, threshold_single=0.9)
    with pytest.raises(NotImplementedError, match="do not move"):
        drafts.copy_all_layer_kv_cache_cpu(None, None, torch.tensor([1]), torch.tensor([2]))


def test_forwards_are_counted_by_what_they_accepted():
    use, parts = CacheUse(), [Response([1, 2], [0.0, 0.0], "stop", 1, accepted=(1, 1))]
    parts.append(Response([3, 4, 5, 6], [0.0] * 4, "stop", 1, accepted=(1, 0, 1)))
    whole = parts[0].then(parts[1])
    assert whole.accepted == (2, 1, 1)
    use.count(4, whole, None)
    metrics = Metrics()
    use.add_metrics(metrics, 2)
    found = metrics.reduced(alone)
    assert found["draft/accepted_1"] == 2 / 4 and found["draft/accepted_2"] == 1 / 4
    assert found["draft/tokens_per_forward"] == (2 + 2 + 3) / 4
    metrics = Metrics()
    use.add_metrics(metrics, 2)
    assert not [name for name in metrics.reduced(alone) if name.startswith("draft/")], "it began anew"


def test_a_model_without_such_a_layer_is_refused_and_one_with_it_has_it_on_request():
    models = ROOT / "configs" / "models"
    with pytest.raises(ValueError, match="one multi-token-prediction layer; num_nextn_predict_layers is 0 here"):
        assert not Model.read(models / "Kimi-K2-Instruct", draft=True).arch.draft
    hf = json.loads((models / "DeepSeek-V3-0324" / "config.json").read_text())
    plain, whole = (Model.read(models / "DeepSeek-V3-0324", draft=draft).arch for draft in (False, True))
    names = {spec.name for spec in model_tensors(whole)} - {spec.name for spec in model_tensors(plain)}
    assert all(name.startswith("model.layers.61.") for name in names)
    assert sum(spec.size for spec in model_tensors(whole) if spec.name in names) == pytest.approx(11.5e9, rel=0.01)
    assert left_out(hf) and not left_out(hf, True)
    assert all(is_left_out(plain, name) and not is_left_out(whole, name) for name in names)
    assert is_left_out(whole, "model.layers.61.embed_tokens.weight"), "the model's own"
    assert not architecture_of({**hf_of(models / "GLM-4.5")}).draft


def hf_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


class LastStage(torch.nn.Module):
    """A stage whose draft reads the output weight, the embedding of a tied model, behind the layers."""

    post_process = True

    def __init__(self):
        super().__init__()
        self.decoder, self.weight = torch.nn.Identity(), torch.zeros(2)

    def output_weight(self) -> torch.Tensor:
        return self.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden) + self.weight


def test_a_draft_behind_the_first_stage_sees_gathered_weights_of_a_tied_model():
    from megagrpo.actor.optimizer import _gather_output_weight

    chunk = LastStage()
    gather = SimpleNamespace(finish_param_sync=lambda skip_next_bucket_dispatch: chunk.weight.fill_(1.0))
    options = SimpleNamespace(align_param_gather=False)
    _gather_output_weight(SimpleNamespace(param_to_bucket_group={chunk.weight: gather}, ddp_config=options), chunk)
    assert chunk(torch.zeros(2)).tolist() == [1.0, 1.0]
