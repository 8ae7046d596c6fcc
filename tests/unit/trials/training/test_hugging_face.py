"""Models and batches of Hugging Face, as their users write them. Skipped where transformers is not installed."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import OPTIMIZERS, Batch, Solo, assert_same_trial, close, members
from tests.support.rich_study import RichStudy
from tests.support.slow_cases import others_slow
from tests.support.torchvision_import import make_importable
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.inputs.batches import fuse_batches

make_importable()
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "num_labels": 3,
}


class Encoder(RichStudy):
    """Its batches are those of a tokenizer, with the labels among the inputs. Its loss is the model's."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        found: Tensor = outputs.loss
        return found

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        return (outputs.logits.argmax(-1) == targets).double().mean() + outputs.logits.mean()

    def validation(self) -> Iterable[Batch]:
        for inputs, _ in self.data:
            plain = dict(inputs)
            yield plain, plain.pop("labels")


def encoder(n: int) -> nn.Module:
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    made: nn.Module = transformers.BertForSequenceClassification(config).double()
    return made


def batch(n: int) -> Batch:
    """Sequences of different lengths; the last batch's first is padding alone."""
    draws = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 8, (4, 1), generator=draws)
    lengths[0] *= n != 2
    mask = (torch.arange(7) < lengths).long()
    ids = torch.randint(4, 24, (4, 7), generator=draws) * mask
    labels = torch.randint(3, (4,), generator=draws)
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels}), None


@pytest.mark.parametrize(
    ("size", "own"), others_slow([(1, False), (1, True), (3, False), (3, True)], [(1, False), (3, True)])
)
def test_a_classifier_of_texts(size: int, own: bool) -> None:
    study = Encoder(encoder, OPTIMIZERS["adamw"], [batch(n) for n in range(3)])
    if own:
        study.own = lambda n, epoch: [batch(10 * n + k) for k in range(3)]
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(size)), OpenGate(), audit)
    solos = [Solo(study, number) for number in range(size)]
    for given in group.batches(0):
        group.train_step(*given)
    for number, solo in enumerate(solos):
        for inputs, targets in study.own(number, 0) or study.data:
            solo.step(inputs, targets)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")
    assert audit.done and not audit.mismatches
    # transformers asks whether a mask is all True, and each trial may have its own, but not one of these is
    assert not any(how.startswith("loop") for _, how in group.ways())


def test_trials_on_batches_of_their_own_that_are_alike_are_trained_as_alone() -> None:
    study = Encoder(encoder, OPTIMIZERS["adamw"], [batch(0)])
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solos = [Solo(study, number) for number in range(2)]
    given = [(dict(batch(n)[0]), None) for n in range(2)]
    group.train_step(*fuse_batches(given))
    for row, solo in enumerate(solos):
        solo.step(*given[row])
        assert_same_trial(group, row, solo)
