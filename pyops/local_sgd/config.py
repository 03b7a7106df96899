"""LocalSGDConfig: how often replicas meet, what they exchange, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.names import parse
from pyops.protocols import CollectiveCodec

__all__ = ["BUFFERS", "METHODS", "STATES", "LocalSGDConfig"]

METHODS = ("local_sgd", "diloco", "easgd")
STATES = ("keep", "average", "reset")
BUFFERS = ("average", "keep")


@dataclass(frozen=True)
class LocalSGDConfig:
    """How replicas that train on their own are brought together.

    Attributes:
        method: "local_sgd": parameters become their mean over the replicas (Stich, 2019; Lin et
            al., 2020). "diloco": the mean of what the replicas moved is the gradient of an outer
            SGD with Nesterov momentum (Douillard et al., arXiv:2311.08105). "easgd": replicas and
            a center attract each other (Zhang, Choromanska, LeCun, arXiv:1412.6651, section 2).
        every: Inner steps from one exchange of a parameter to the next; H in the papers.
        after: The first so many steps end with an exchange each, whose mean is taken as it is, and
            `every` and the outer optimizer hold from then on: post-local SGD (Lin et al.,
            arXiv:1808.07217), and DiLoCo from a model that has begun to learn, as in its paper
            (section 3); 0: from the beginning.
        outer_lr: The outer learning rate of "diloco".
        outer_momentum: The outer momentum of "diloco", with Nesterov's look ahead where it is
            more than 0.
        alpha: How far "easgd" moves a replica towards the center, as a part of their distance;
            0: 0.9 / replicas, the paper's choice.
        fragments: In how many parts of whole layers the model is exchanged, one after the other,
            evenly over `every` steps (Streaming DiLoCo, arXiv:2501.18512, section 2).
        delay: Inner steps that are taken while an exchange is on its way; 0: the exchange ends
            with the step at which it begins.
        keep_local: Of a parameter that arrives, the part of the replica's own value that is kept,
            from 0 to 1: the mixing factor of Streaming DiLoCo.
        codec: How differences are written for the wire: a codec of pyops.comm, or the name of one
            such as "bf16", "int8", "int4" or "onebit"; "none": as they are. What a codec leaves
            out is added to the next difference.
        states: What becomes of the inner optimizer's states at an exchange: "keep" leaves each
            replica its own, "average" takes their mean, "reset" forgets them.
        buffers: What becomes of floating-point buffers that the model saves, such as the running
            statistics of a batch norm, at the end of each period: "average" or "keep".

    Raises:
        ValueError: A value that is out of its range, naming it.
        TypeError: A value of another type.
    """

    method: str = "diloco"
    every: int = 50
    after: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    alpha: float = 0.0
    fragments: int = 1
    delay: int = 0
    keep_local: float = 0.0
    codec: Codec | str = "none"
    states: str = "keep"
    buffers: str = "average"

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("states", STATES), ("buffers", BUFFERS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        for name, least in (("every", 1), ("after", 0), ("fragments", 1), ("delay", 0)):
            _check_whole(name, getattr(self, name), least)
        for name in ("outer_lr", "outer_momentum", "alpha", "keep_local"):
            _check_number(name, getattr(self, name))
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr is {self.outer_lr}; give more than 0, such as 0.7")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum is {self.outer_momentum}; give 0 or more, and less than 1"
            )
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; give a number from 0 to 1")
        if not 0 <= self.keep_local <= 1:
            raise ValueError(f"keep_local is {self.keep_local}; give a number from 0 to 1")
        self._check_period()
        self._check_method()

    def _check_period(self) -> None:
        """What does not fit into a period."""
        if self.fragments > self.every:
            raise ValueError(
                f"fragments is {self.fragments}, but a period has every = {self.every} steps, "
                "and each fragment begins at a step of its own; set fragments to "
                f"{self.every} or less"
            )
        if self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay is {self.delay}, but an exchange begins every {self.every} // "
                f"{self.fragments} = {self.every // self.fragments} steps (every, fragments) and "
                f"must end before the next; set delay to {self.every // self.fragments - 1} or "
                "less"
            )

    def _check_method(self) -> None:
        """What does not go with the method."""
        if self.method == "easgd" and self.keep_local:
            raise ValueError(
                f"keep_local is {self.keep_local}, but method 'easgd' keeps 1 - alpha of a "
                "replica's own value; leave keep_local out"
            )
        if self.after and self.method == "easgd":
            raise ValueError(
                f"after is {self.after}, but the replicas of method 'easgd' attract each other "
                "from the first step on; set after to 0"
            )
        self.check_codec()

    def check_codec(self) -> None:
        """ValueError or TypeError for a codec that writes no differences."""
        if isinstance(self.wire_codec, CollectiveCodec):
            raise ValueError(
                f"codec is {self.codec!r}, which multiplies matrices while it communicates; "
                "choose one that writes numbers, such as 'int8'"
            )

    @property
    def wire_codec(self) -> Codec | None:
        """The codec of differences; None: they travel as they are."""
        if isinstance(self.codec, Codec):
            return self.codec
        if not isinstance(self.codec, str):
            raise TypeError(
                f"codec is {self.codec!r}; give a codec of pyops.comm, such as Int8(), or its name"
            )
        if self.codec in ("none", "identity"):
            return None
        try:
            return parse(self.codec)
        except ValueError as error:
            known = str(error).partition("; ")[2]
            raise ValueError(f"codec is {self.codec!r}; {known}") from None

    @property
    def averages(self) -> bool:
        """Whether a parameter simply becomes the mean of the replicas' values: "local_sgd", and
        "diloco" with outer_lr 1 and outer_momentum 0, which is the same."""
        if self.method == "diloco":
            return self.outer_lr == 1 and self.outer_momentum == 0
        return self.method == "local_sgd"


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give a whole number, {least} or more")
    if value < least:
        raise ValueError(f"{name} is {value}; give a whole number, {least} or more")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; give a number")
