"""Readings (interpretations) of F2L's paper: its open questions, and the choices of each mode.

A reading also covers points on which the authors' code differs from the paper.

Source: Wang et al., Federated Few-shot Learning, KDD 2023; the authors' published code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar, get_args

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.ranges import Above0, AtLeast0, Below1, NotNegative, check_options
from fedshot.learners.maml import InnerLoop
from fedshot.learners.probe import Probe
from fedshot.methods.f2l.client_model import HeadStart
from fedshot.methods.f2l.set_transformer import Queries
from fedshot.methods.f2l.transfer import Denominator
from fedshot.nn.optim import Optimizer

F2LMode = Literal["tuned", "strict", "paper", "official"]
T = TypeVar("T")


@dataclass(frozen=True)
class F2LReading:
    """An interpretation of the paper: one field for each question that it leaves open.

    The fields are options of the method `f2l`; their defaults here are those of mode "strict".
    """

    lambda_mi: NotNegative = 0.5
    lambda_kd: NotNegative = 0.5
    weights: Literal["shared", "added"] = "shared"
    mi_loss: Literal["confidences", "shots"] = "confidences"
    mi_denominator: Denominator = "all"
    mi_tau: Above0 = 0.5
    mi_from: Literal["tuned", "psi"] = "tuned"
    mi_gradient: Literal["server", "both"] = "server"
    kd_targets: Literal["softmax", "sum"] = "softmax"
    server_rows: Literal["support", "both"] = "support"
    client_phi: Literal["old", "new"] = "old"
    classifier: Literal["linear", "mlp"] = "linear"
    queries: Queries = "support_context"
    head_start: HeadStart = "zero"
    evaluated: Literal["client", "server"] = "client"
    probe: Probe = "logistic"
    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        check_options(self)
        if self.weights == "shared" and max(self.lambda_mi, self.lambda_kd) > 1:
            raise ConfigError(
                f"lambda_mi is {self.lambda_mi} and lambda_kd is {self.lambda_kd}; expected at "
                "most 1, because the cross-entropy has the weight 1 - lambda. Or set weights to "
                "'added'."
            )


@dataclass(frozen=True)
class InnerChoice:
    """The options of `InnerLoop`; a null value means the default of the method's `mode`.

    Args:
        lr: step size.
        steps: gradient steps in training.
        test_steps: gradient steps at test.
        order: "second" differentiates through the steps, "first" does not.
        adapts: "all" parameters, or the "head" alone.
    """

    lr: Above0 | None = None
    steps: AtLeast0 | None = None
    test_steps: AtLeast0 | None = None
    order: Literal["first", "second"] | None = None
    adapts: Literal["all", "head"] | None = None


@dataclass(frozen=True)
class OptimizerChoice:
    """The options of `Optimizer`; a null value means the default of the method's `mode`.

    Args:
        name: "sgd" or "adam".
        lr: step size.
        momentum: momentum of SGD; Adam has its own.
        weight_decay: weight_decay * w is added to the gradient.
    """

    name: Literal["sgd", "adam"] | None = None
    lr: Above0 | None = None
    momentum: Below1 | None = None
    weight_decay: NotNegative | None = None

    def over(self, base: Optimizer) -> Optimizer:
        """Return `base` with the options that are set here, i.e. not null.

        If `name` is set and differs from that of `base`, null options take the defaults of
        `Optimizer`, not the values of `base`.
        """
        other = self.name is not None and self.name != base.name
        return chosen(Optimizer(self.name or base.name) if other else base, self)


@dataclass(frozen=True)
class F2LDefaults:
    """The values that a mode gives to options that are null, grouped by what they configure."""

    reading: F2LReading
    inner: InnerLoop
    server: Optimizer
    client: Optimizer | None = None  # None: the server-model's optimiser


_ADAM = Optimizer("adam", 1e-3, weight_decay=1e-4)
_STRICT = F2LDefaults(F2LReading(), InnerLoop(0.01, 1, 1, "first"), _ADAM)
_TUNED = F2LDefaults(
    F2LReading(lambda_mi=1.0), InnerLoop(0.1, 5, 5, "first", "head"), _ADAM, Optimizer("sgd", 1e-3)
)
_CODE = F2LReading(
    lambda_mi=0.1,
    lambda_kd=0.1,
    weights="added",
    mi_loss="shots",
    kd_targets="sum",
    server_rows="both",
    classifier="mlp",
    queries="query_set",
    evaluated="server",
    weighting="examples",
)


def f2l_defaults(mode: F2LMode, *, text: bool) -> F2LDefaults:
    """Return the values that a mode gives to null options; `text` is true if the data are texts.

    "official" has the values of the authors' code. "paper" follows three of the paper's equations
    to the letter, and "strict" departs from them:

    - Eq. (10): in "paper", b is normalised over the support of the row's class, at temperature 1;
      in "strict", over the whole support, at temperature 0.5.
    - Eq. (4): "paper" differentiates it with respect to psi, through fine-tuning; "strict", with
      respect to psi~.
    - Eq. (5): in "paper", its gradient reaches phi also through the client-model, whose inputs are
      features under phi; in "strict", it does not.

    "tuned" is "strict" with three changes, found on validation classes of headlines. lambda_mi is
    1. As in the authors' code, the client-model is trained by SGD with a step of 0.001, and its
    head alone is fine-tuned, by 5 steps of 0.1; in "strict" the head does not learn.

    In all three, L_MI uses the fine-tuned psi~ of section 3.2.2, where eq. (5) has psi.
    """
    check_word("mode", mode, get_args(F2LMode))
    if mode in ("strict", "tuned"):
        return _STRICT if mode == "strict" else _TUNED
    if mode == "paper":
        reading = F2LReading(mi_denominator="same_class", mi_tau=1.0, mi_gradient="both")
        return replace(_STRICT, reading=reading, inner=replace(_STRICT.inner, order="second"))
    inner = InnerLoop(0.1, 5, 5, "first", "head")
    if text:
        reading = replace(_CODE, lambda_kd=0.0)
        return F2LDefaults(reading, inner, Optimizer("adam", 1e-3), Optimizer("sgd", 5e-3))
    server = Optimizer("sgd", 0.05, momentum=0.9, weight_decay=1e-5)
    return F2LDefaults(_CODE, inner, server, Optimizer("sgd", 1e-3))


def chosen(base: T, choice: object) -> T:
    """Return the dataclass `base` with the fields of `choice` that are not None."""
    found = {f.name: getattr(choice, f.name, None) for f in fields(base)}  # type: ignore[arg-type]
    said = {name: value for name, value in found.items() if value is not None}
    return replace(base, **said)  # type: ignore[type-var]
