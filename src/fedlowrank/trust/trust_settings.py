"""Settings of what happens to an update between a client and the server.

client:  update -> clip -> [local noise] -> compress (with error feedback) -> message
server:  decode -> contribution -> rule (mean or robust) -> [central noise] -> server_update
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.arguments.bounds import check_bounds
from ..core.arguments.field_checks import CheckedFields
from ..core.arguments.switch import Switch, check_switch
from ..core.errors import ConfigError

_RULES = ("median", "trimmed_mean", "geometric_median", "norm_bound", "krum", "multi_krum")
_WITH_STRENGTH = ("sign_flip", "scaled", "gaussian", "alie", "inner_product", "examples")

MAX_NOISE = 1e6
"""Largest noise multiplier σ: above it nothing can be learned, and the accountants' squares overflow."""


@dataclass(frozen=True)
class Compression(CheckedFields):
    """Compression of updates on their way to the server.

    Attributes:
        uplink: stages from left to right, such as ``"top_k:0.05 + int8"``; empty for no compression. Stages are
            bfloat16, int8 (one scale for each row), low_rank:RANK and top_k:SHARE (of the entries of all tensors
            together).
        error_feedback: whether a client adds what compression lost to its next update. This helps little if factors begin
            each round in other coordinates, as FedHL's do.
    """

    uplink: str = ""
    error_feedback: bool = True

    switch: ClassVar[Switch] = Switch("uplink", {"error_feedback": ()})

    def __post_init__(self) -> None:
        check_switch(self, self.switch, "run.compression")


@dataclass(frozen=True)
class Clipping(CheckedFields):
    """A bound on the norm of every update.

    Attributes:
        norm: C, the bound; None for no bound. With a quantile, the bound of the first round.
        quantile: γ, the share of updates that the bound leaves unchanged: the bound adapts to their norms
            (Andrew et al. 2021). None keeps it fixed.
        rate: η_C, the step size with which the bound adapts.
    """

    norm: float | None = None
    quantile: float | None = None
    rate: float = 0.2

    switch: ClassVar[Switch] = Switch("quantile", {"rate": ()})

    def __post_init__(self) -> None:
        check_switch(self, self.switch, "run.clipping")
        check_bounds(self, {"norm": "> 0", "quantile": "> 0 and < 1", "rate": "> 0"}, "run.clipping")
        if self.quantile is not None and self.norm is None:
            raise ConfigError(
                "run.clipping.quantile: the bound needs a first value; set run.clipping.norm, too"
            )


@dataclass(frozen=True)
class Privacy(CheckedFields):
    """Differential privacy of clients.

    Attributes:
        kind: central: the server adds noise to the sum of clipped updates; local: every client adds noise to
            its own update.
        noise: σ, the noise multiplier: the standard deviation in units of the clipping norm, at most 1e6. None
            finds the smallest with which all rounds stay within ``epsilon``.
        epsilon: ε, the budget; the run stops before it is exceeded. None for no bound.
        delta: δ of the (ε, δ) guarantee.
        accountant: method that computes ε: pld (tight) or rdp.
    """

    kind: Literal["none", "central", "local"] = "none"
    noise: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    accountant: Literal["pld", "rdp"] = "rdp"

    switch: ClassVar[Switch] = Switch(
        "kind", dict.fromkeys(("noise", "epsilon", "delta", "accountant"), ("central", "local"))
    )

    def __post_init__(self) -> None:
        check_bounds(self, {"noise": "> 0", "epsilon": "> 0", "delta": "> 0 and < 1"}, "run.privacy")
        check_switch(self, self.switch, "run.privacy")
        if self.kind == "none":
            return
        # accounting uses half of a local σ: an update may replace another one of the norm C
        min_noise = 2e-6 if self.kind == "local" else 1e-6
        check_bounds(self, {"noise": f">= {min_noise:g} and <= {MAX_NOISE:g}"}, "run.privacy")
        if self.delta is None:
            raise ConfigError(
                "run.privacy.delta is needed: ε means nothing without it. A usual δ is below 1 / clients"
            )
        if self.noise is None and self.epsilon is None:
            raise ConfigError(
                "run.privacy: set run.privacy.noise (σ), or run.privacy.epsilon, from which σ is found, or both"
            )


@dataclass(frozen=True)
class Robust(CheckedFields):
    """Protection of the mean against hostile clients.

    Attributes:
        rule: mean; median and trimmed_mean (by coordinate); geometric_median (RFA); norm_bound (updates are
            scaled to at most the median norm); krum and multi_krum (selection).
        hostile: share of a round's replies that may be hostile: the share that trimmed_mean cuts on either side, and f
            of Krum.
        weights: equal: under a rule every client counts the same, because a hostile one may lie about its number
            of examples n_k; examples: the method's weights, with n_k up to ten times its median.
    """

    rule: Literal[
        "mean", "median", "trimmed_mean", "geometric_median", "norm_bound", "krum", "multi_krum"
    ] = "mean"
    hostile: float = 0.2
    weights: Literal["equal", "examples"] = "equal"

    # the other rules hold against any minority of hostile clients, whatever share is assumed
    switch: ClassVar[Switch] = Switch("rule", dict.fromkeys(("hostile", "weights"), _RULES))

    def __post_init__(self) -> None:
        check_bounds(self, {"hostile": ">= 0 and < 0.5"}, "run.robust")
        check_switch(self, self.switch, "run.robust")


@dataclass(frozen=True)
class Attack(CheckedFields):
    """Simulated attack of hostile clients.

    Attributes:
        kind: label_flip and backdoor change their training data; sign_flip, scaled, gaussian, alie ("a little
            is enough") and inner_product change their updates; examples lies about n_k.
        share: share of the clients that may train (all but those of ``run.unseen``) that are hostile, drawn at random.
        strength: strength of the attack; None for its default (:mod:`fedlowrank.trust.attacks`).
        target: class that the trigger of a backdoor leads to.
    """

    kind: Literal[
        "none",
        "label_flip",
        "backdoor",
        "sign_flip",
        "scaled",
        "gaussian",
        "alie",
        "inner_product",
        "examples",
    ] = "none"
    share: float = 0.2
    strength: float | None = None
    target: int = 0

    switch: ClassVar[Switch] = Switch(
        "kind",
        {
            "share": ("label_flip", "backdoor", *_WITH_STRENGTH),
            "strength": _WITH_STRENGTH,
            "target": ("backdoor",),
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, {"share": "> 0 and <= 1", "strength": "> 0", "target": ">= 0"}, "run.attack")
        check_switch(self, self.switch, "run.attack")


@dataclass(frozen=True)
class SecureSums(CheckedFields):
    """Sums in which the server sees no single update (Bonawitz et al. 2017).

    Attributes:
        on: whether the server sees only masked uploads and their sum.
        bits: number of bits of a quantized number.
        bound: numbers are clipped to ±bound before they are quantized.
        threshold: share of the round's clients that must reply, in a simulation; over a network it is ⌊2n/3⌋ + 1 of n.
    """

    on: bool = False
    bits: int = 22
    bound: float = 8.0
    threshold: float = 0.66

    switch: ClassVar[Switch] = Switch("on", dict.fromkeys(("bits", "bound", "threshold"), (True,)))

    def __post_init__(self) -> None:
        bounds = {"bits": ">= 2 and <= 32", "bound": "> 0", "threshold": "> 0.5 and <= 1"}
        check_bounds(self, bounds, "run.secure")
        check_switch(self, self.switch, "run.secure")


@dataclass(frozen=True)
class Trust(CheckedFields):
    """All settings of trust; by default nothing happens to an update, and a run has the same bits as without.

    Attributes:
        compression: compression of updates.
        clipping: clipping of updates.
        privacy: differential privacy of clients.
        robust: robust rule of the server.
        attack: simulated attack of hostile clients.
        secure: secure sums, computed with masks.
    """

    compression: Compression = Compression()
    clipping: Clipping = Clipping()
    privacy: Privacy = Privacy()
    robust: Robust = Robust()
    attack: Attack = Attack()
    secure: SecureSums = SecureSums()

    def __post_init__(self) -> None:
        if self.privacy.kind != "none" and self.clipping.norm is None:
            raise ConfigError("run.privacy: the noise is scaled to the clipping norm; set run.clipping.norm")
        if self.privacy.kind != "none" and self.robust.rule != "mean":
            raise ConfigError(
                f"run.privacy holds for sums, and run.robust.rule = {self.robust.rule!r} is none; leave one of them "
                "out"
            )
        if self.privacy.kind == "local" and self.clipping.quantile is not None:
            raise ConfigError(
                "run.clipping.quantile: under local privacy, whether an update was clipped would have to be "
                "hidden by noise, too; set a fixed run.clipping.norm alone"
            )
        has_hostile_limit = self.robust.rule in ("trimmed_mean", "krum", "multi_krum")
        if self.attack.kind != "none" and has_hostile_limit and self.attack.share > self.robust.hostile:
            raise ConfigError(
                f"run.robust.rule = {self.robust.rule!r} holds against run.robust.hostile = {self.robust.hostile:g} "
                f"of the clients, but run.attack.share = {self.attack.share:g} of them are hostile; raise the "
                "one or lower the other"
            )
        if self.secure.on and self.robust.rule != "mean":
            raise ConfigError(
                f"run.robust.rule = {self.robust.rule!r} must see single replies, which secure sums hide; leave "
                "one of them out"
            )
