"""Arguments for every op of the library, with pairwise different, non-default scalars.

The stable ABI compares no schema with a C++ signature: two swapped scalars show only when they
differ. A test walks the library and fails for an op that has no sample here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.attention.sample import attention_backward, attention_forward
from tests.ops.code_samples import CODE_SAMPLES
from tests.ops.decoding.decoding_samples import SAMPLES as DECODING
from tests.ops.image_samples import IMAGE_SAMPLES
from tests.ops.layers.fake_quantize_samples import FAKE_QUANTIZE_SAMPLES
from tests.ops.sparse.samples import SPARSE_SAMPLES

Sample = tuple[tuple[Any, ...], dict[str, Any]]

ADAM_SCALARS = {
    "lr": 0.03,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-3,
    "weight_decay": 0.2,
    "decoupled": True,
    "maximize": False,
    "zero_grads": True,
    "stochastic_rounding": False,
    "seed": 7,
}


def adam_lists(
    device: torch.device, sizes: tuple[tuple[int, ...], ...] = ((5,), (3, 4))
) -> list[list[Tensor]]:
    """params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, copies, steps."""

    def several(scale: float = 1.0) -> list[Tensor]:
        return [torch.randn(size, device=device) * scale for size in sizes]

    params, squares = several(), [t.abs() for t in several()]
    return [
        [p.bfloat16() for p in params],
        several(),
        several(0.1),
        squares,
        [2 * v for v in squares],
        params,
        [torch.zeros(size, device=device, dtype=torch.float16) for size in sizes],
        [torch.tensor(float(3 + i), device=device) for i in range(len(sizes))],
    ]


def _device_scalars(device: torch.device) -> list[Tensor]:
    """lr_tensor, grad_factor, found_inf."""
    return [torch.tensor(x, device=device) for x in (0.04, 0.5, 0.0)]


# Scalars of each elementwise optimizer, and which of adam_lists' columns its op takes.
AROUND = {"maximize": False, "zero_grads": True, "stochastic_rounding": False, "seed": 7}
RULES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "adam": (ADAM_SCALARS, tuple(range(8))),
    "sgd": (
        {
            "lr": 0.03,
            "momentum": 0.8,
            "dampening": 0.3,
            "weight_decay": 0.2,
            "nesterov": True,
            **AROUND,
        },
        (0, 1, 2, 5, 6, 7),
    ),
    "lion": (
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.2, **AROUND},
        (0, 1, 2, 5, 6, 7),
    ),
    "adagrad": (
        {"lr": 0.03, "lr_decay": 0.4, "weight_decay": 0.2, "eps": 1e-3, **AROUND},
        (0, 1, 3, 5, 6, 7),
    ),
}


def _step(rule: str, device: torch.device) -> Sample:
    scalars, columns = RULES[rule]
    lists = adam_lists(device)
    return (*(lists[c] for c in columns), *_device_scalars(device)), {
        **scalars,
        "offsets": [11, 29],
    }


def _from_table(rule: str, device: torch.device) -> Sample:
    lists = adam_lists(device)
    columns = [tensors if c in RULES[rule][1] else [] for c, tensors in enumerate(lists)]
    table = torch.ops.pyops.optimizer_table.default(*columns, [11, 29])
    table.keep_alive = lists
    return (table, *_device_scalars(device)), RULES[rule][0]


# The same for those that go by layers, whose ops also take room for the norms.
LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "lamb": (
        {
            "lr": 0.03,
            "beta1": 0.8,
            "beta2": 0.95,
            "eps": 1e-3,
            "weight_decay": 0.2,
            "min_ratio": 0.1,
            "max_ratio": 7.0,
            "trust_ratio": True,
            "passes": 3,
            **AROUND,
        },
        (0, 1, 2, 3, 5, 6, 7),
    ),
    "lars": (
        {
            "lr": 0.03,
            "momentum": 0.8,
            "dampening": 0.3,
            "weight_decay": 0.2,
            "trust_coefficient": 0.6,
            "eps": 1e-3,
            "nesterov": False,
            "trust_ratio": True,
            "passes": 3,
            **AROUND,
        },
        (0, 1, 2, 5, 6, 7),
    ),
}


def _norms(device: torch.device) -> Tensor:
    return torch.zeros(2, 2, dtype=torch.float64, device=device)


def _layer_step(rule: str, device: torch.device) -> Sample:
    scalars, columns = LAYERS[rule]
    lists = adam_lists(device)
    return (*(lists[c] for c in columns), _norms(device), *_device_scalars(device)), {
        **scalars,
        "offsets": [11, 29],
    }


def _layers_from_table(rule: str, device: torch.device) -> Sample:
    lists = adam_lists(device)
    columns = [tensors if c in LAYERS[rule][1] else [] for c, tensors in enumerate(lists)]
    table = torch.ops.pyops.optimizer_table.default(*columns, [11, 29])
    table.keep_alive = lists
    return (table, _norms(device), *_device_scalars(device)), LAYERS[rule][0]


def _adafactor(device: torch.device) -> Sample:
    params, grads, _, _, _, masters, copies, steps = adam_lists(device)
    none = torch.empty(0, device=device)
    variances = [torch.full((5,), 0.3, device=device), none]
    states = (
        [none, torch.rand(3, 1, device=device)],
        [none, torch.rand(1, 4, device=device)],
        variances,
    )
    scalars = {
        "lr": 0.03,
        "beta2_decay": -0.7,
        "eps1": 1e-2,
        "eps2": 0.04,
        "d": 1.25,
        "weight_decay": 0.2,
        **AROUND,
    }
    return (params, grads, *states, masters, copies, steps, *_device_scalars(device)), {
        **scalars,
        "offsets": [11, 29],
    }


def _frozen_adam(device: torch.device) -> Sample:
    params, _, exp_avgs, exp_avg_sqs, _, masters, copies, _ = adam_lists(device)
    exp_avg_sqs[1][0] = 0.0
    lr, _, found_inf = _device_scalars(device)
    return (params, exp_avgs, exp_avg_sqs, masters, copies, lr, found_inf), {
        "lr": 0.03,
        "eps": 1e-3,
        "weight_decay": 0.2,
    }


def _momentum(device: torch.device) -> Sample:
    _, grads, exp_avgs, *_ = adam_lists(device)
    return (exp_avgs, grads, *_device_scalars(device)[1:]), {"beta": 0.8, "zero_grads": True}


def _norm_from_table(device: torch.device) -> Sample:
    return _from_table("adam", device)[0][:1], {}


def _rows(device: torch.device) -> list[Tensor]:
    return [torch.randn(6, device=device).bfloat16() for _ in range(3)]


def _symmetric_sum(device: torch.device) -> Sample:
    """Of one rank, which has nobody to wait for."""
    row, whole, out = _rows(device)
    failure = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    pad = torch.zeros(8192, dtype=torch.int64, device=device)
    norm = torch.zeros(2, dtype=torch.float64, device=device)
    options = {"rank": 0, "ctas": 3, "scale": 0.25, "timeout_ns": 10**9}
    return (whole, [out], [row], [pad], failure, norm), options


def _symmetric_adam(device: torch.device) -> Sample:
    """Of one rank, whose shard is two rows."""
    (*_, [pad], failure, _), _ = _symmetric_sum(device)
    torch.manual_seed(11)
    params, grads = (torch.randn(70, device=device).bfloat16() for _ in range(2))
    lists = [[whole[3:40], whole[40:70]] for whole in (params, grads)]
    lists += [[torch.rand(n, device=device) for n in (37, 30)] for _ in range(2)]
    lists += [[], [x.float() for x in lists[0]], []]
    lists.append([torch.tensor(float(k), device=device) for k in (3, 4)])
    table = torch.ops.pyops.optimizer_table.default(*lists, [0, 0])
    table.keep_alive = lists
    options = {
        **{k: v for k, v in ADAM_SCALARS.items() if k in _OF_ADAM},
        "rank": 0,
        "ctas": 3,
        "scale": 0.25,
        "in_fp32": False,
        "timeout_ns": 10**9,
    }
    return (table, [grads], [params], [pad], failure, *_device_scalars(device)), options


_OF_ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
_PLACE = {"key": -3, "offset": 5, "row": 3, "row_stride": 8}


def _codec(device: torch.device, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """payload of `size` bytes, x of 70 elements in bf16, error, flag."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    return (
        payload,
        torch.randn(70, device=device).bfloat16(),
        torch.randn(70, device=device),
        torch.zeros(1, device=device),
    )


def _payloads(device: torch.device, stem: str, **options: Any) -> list[Tensor]:
    """Two payloads of 70 numbers, of blocks of 64."""
    payloads = []
    for _ in range(2):
        payload, x, _, _ = _codec(device, {"onebit": 17, "quantize": 78}[stem])
        getattr(torch.ops.pyops, f"{stem}_encode_").default(
            payload, x, None, None, block=64, **options
        )
        payloads.append(payload)
    return payloads


def _reencode(device: torch.device, stem: str, **options: Any) -> Sample:
    payloads = _payloads(
        device, stem, **({"rule": "rms"} if stem == "onebit" else {"format": "e4m3"})
    )
    return (torch.zeros_like(payloads[0]), payloads, *_codec(device, 1)[2:]), {
        "n": 70,
        "block": 64,
        "scale": 0.3,
        **options,
    }


def _layer(device: torch.device, width: int, *, bias: int, activation: str) -> Sample:
    """x [2, 3, width] with gaps between its rows, and a bias of `bias` elements."""
    x = torch.randn(2, 3, width + 2, device=device)[..., :width]
    return (x, torch.randn(bias, device=device)), {"activation": activation}


def _layer_backward(device: torch.device, dy: int, *, width: int, activation: str) -> Sample:
    args, kwargs = _layer(device, width, bias=width, activation=activation)
    return (torch.randn(2, 3, dy, device=device), *args), {**kwargs, "bias_grad": True}


def _state(device: torch.device) -> Tensor:
    """Key and offset of a dropout stream."""
    return torch.tensor([-7, 5], device=device)


def _dropout_add(device: torch.device) -> Sample:
    x, residual = (
        torch.randn(2, 3, 5, device=device),
        torch.randn(3, 2, 5, device=device).transpose(0, 1),
    )
    return (x, torch.randn(5, device=device), residual, _state(device)), {"p": 0.3}


def _rotary(device: torch.device) -> Sample:
    x, angle = (
        torch.randn(2, 4, 3, 10, device=device).transpose(1, 2),
        torch.randn(2, 3, 4, device=device),
    )
    return (x, angle.cos(), angle.sin()), {"interleaved": True, "inverse": False}


def _norm(device: torch.device, *, added: bool, bias: bool) -> tuple[Any, ...]:
    """x [2, 3, 5] with gaps between its rows, a transposed residual, weight, bias or None."""
    x, residual = (
        torch.randn(2, 3, 7, device=device)[..., :5],
        torch.randn(3, 2, 5, device=device).transpose(0, 1),
    )
    vectors = [torch.randn(5, device=device) for _ in range(1 + bias)]
    return (x, *([residual] if added else []), *vectors)


def _norm_backward(device: torch.device, *, statistics: int) -> tuple[Any, ...]:
    """dy, dsum, x, weight, and what the forward op gave: mean and rstd, or rstd."""
    dy, dsum, x = (torch.randn(2, 3, 7, device=device)[..., :5] for _ in range(3))
    return (
        dy,
        dsum,
        x,
        torch.randn(5, device=device),
        *(torch.rand(2, 3, device=device) + 0.5 for _ in range(statistics)),
    )


_ROUNDING = {"stochastic_rounding": True, "seed": -12345, "offset": 13}


def _logits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two columns of padding; a target here, one that is ignored, one of another rank's part."""
    return torch.randn(3, 7, device=device).half(), torch.tensor([6, 9, 1], device=device)


SAMPLES: dict[str, Callable[[torch.device], Sample]] = {
    **{f"{rule}_": partial(_step, rule) for rule in RULES},
    **{f"{rule}_from_table_": partial(_from_table, rule) for rule in RULES},
    **{f"{rule}_": partial(_layer_step, rule) for rule in LAYERS},
    **{f"{rule}_from_table_": partial(_layers_from_table, rule) for rule in LAYERS},
    "optimizer_table": lambda device: ((*adam_lists(device), [11, 29]), {}),
    "gradients_fit": lambda device: (
        ([torch.randn(3, device=device), torch.randn(2, 2, device=device).half()],),
        {
            "expected": [
                3 * 16 + 8 * (device.type == "cpu"),
                4 * 16 + 8 * (device.type == "cpu") + 2,
            ]
        },
    ),
    "adafactor_": _adafactor,
    "frozen_adam_": _frozen_adam,
    "momentum_": _momentum,
    "squared_norm": lambda device: (
        ([torch.randn(5, device=device), torch.randn(3, device=device).half()],),
        {},
    ),
    "squared_norm_from_table": _norm_from_table,
    "accumulate_": lambda device: (
        (torch.randn(6, device=device), _rows(device)[0]),
        {"scale": 0.5},
    ),
    "sum_rows_": lambda device: ((torch.randn(6, device=device), _rows(device)), {"scale": 0.25}),
    "scale_cast_": lambda device: (
        (torch.zeros(6, device=device).half(), _rows(device)[0]),
        {"scale": 0.75},
    ),
    "symmetric_sum_": _symmetric_sum,
    "symmetric_adam_from_table_": _symmetric_adam,
    "onebit_encode_": lambda device: (_codec(device, 17), {"block": 64, "rule": "rms"}),
    "onebit_norm": lambda device: (_codec(device, 1)[1:3], {}),
    "onebit_encode_scaled_": lambda device: (
        (*_codec(device, 9)[:3], torch.full((1,), 0.7, device=device)),
        {},
    ),
    "onebit_decode_": lambda device: (
        (torch.randn(70, device=device).half(), _payloads(device, "onebit", rule="l1")[0], None),
        {"block": 64, "scale": 0.3, "accumulate": True},
    ),
    "onebit_sum_rows_": lambda device: (
        (torch.randn(70, device=device), _payloads(device, "onebit", rule="l1"), None),
        {"block": 64, "scale": 0.3},
    ),
    "onebit_reencode_": lambda device: _reencode(device, "onebit", rule="rms"),
    "quantize_encode_": lambda device: (
        _codec(device, 78),
        {"block": 64, "format": "e5m2", **_ROUNDING},
    ),
    "quantize_decode_": lambda device: (
        (torch.randn(70, device=device).half(), _payloads(device, "quantize", format="int8")[0]),
        {"block": 64, "format": "int8", "scale": 0.3, "accumulate": True},
    ),
    "quantize_sum_rows_": lambda device: (
        (torch.randn(70, device=device), _payloads(device, "quantize", format="e5m2")),
        {"block": 64, "format": "e5m2", "scale": 0.3},
    ),
    "quantize_reencode_": lambda device: _reencode(device, "quantize", format="e4m3", **_ROUNDING),
    "bias_activation": lambda device: _layer(device, 5, bias=5, activation="gelu"),
    "bias_activation_backward": lambda device: _layer_backward(
        device, 5, width=5, activation="gelu_tanh"
    ),
    "bias_gated": lambda device: _layer(device, 6, bias=6, activation="silu"),
    "bias_gated_backward": lambda device: _layer_backward(device, 3, width=6, activation="gelu"),
    "bias_dropout_add": _dropout_add,
    "bias_dropout_add_backward": lambda device: (
        (torch.randn(2, 3, 5, device=device), _state(device)),
        {"p": 0.3, "bias_grad": True},
    ),
    "dropout": lambda device: (
        (torch.randn(2, 3, 5, device=device), _state(device)),
        {"p": 0.3, "row": 7, "row_stride": 11},
    ),
    "rotary": _rotary,
    **DECODING,
    "few_rows_linear": lambda device: (
        (
            torch.randn(2, 21, 3, device=device).mT,  # of other strides
            torch.randn(5, 21, device=device),
            torch.randn(5, device=device),
        ),
        {},
    ),
    **FAKE_QUANTIZE_SAMPLES,
    **IMAGE_SAMPLES,
    **CODE_SAMPLES,
    **SPARSE_SAMPLES,
    "layer_norm": lambda device: (_norm(device, added=False, bias=True), {"eps": 0.1}),
    "rms_norm": lambda device: (
        _norm(device, added=False, bias=False),
        {"eps": 0.1, "offset": 0.7},
    ),
    "add_layer_norm": lambda device: (_norm(device, added=True, bias=True), {"eps": 0.1}),
    "add_rms_norm": lambda device: (
        _norm(device, added=True, bias=False),
        {"eps": 0.1, "offset": 0.7},
    ),
    "layer_norm_backward": lambda device: (
        _norm_backward(device, statistics=2),
        {"weight_grad": True},
    ),
    "rms_norm_backward": lambda device: (
        _norm_backward(device, statistics=1),
        {"offset": 0.7, "weight_grad": True},
    ),
    "cross_entropy_statistics_": lambda device: (
        (torch.zeros(3, 4, device=device), *_logits(device)),
        {"ignore_index": 9, "first_column": 4, "columns": 5},
    ),
    "cross_entropy_gradient_": lambda device: (
        (
            torch.ones(3, 7, device=device).half(),
            *_logits(device),
            torch.ones(3, device=device),
            torch.randn(3, 3, device=device),
        ),
        {"ignore_index": 9, "first_column": 4, "columns": 5},
    ),
    "attention_forward": attention_forward,
    "attention_backward": attention_backward,
    "philox_uniform_": lambda device: ((torch.zeros(2, 3, device=device),), _PLACE),
    "philox_normal_": lambda device: ((torch.zeros(2, 3, device=device),), _PLACE),
    "philox_dropout_mask_": lambda device: (
        (torch.zeros(2, 3, device=device, dtype=torch.bool),),
        {"p": 0.3, **_PLACE},
    ),
}

# Operands of these hide behind pointers; their fakes refuse.
UNTRACEABLE = (
    *(f"{rule}_from_table_" for rule in (*RULES, *LAYERS)),
    "squared_norm_from_table",
    "symmetric_adam_from_table_",
)

# What opcheck can't ask: a table's numbers are pointers, another one in each run.
OPCHECKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(UNTRACEABLE, ("test_schema",)),
    "optimizer_table": ("test_schema", "test_faketensor", "test_autograd_registration"),
    "gradients_fit": ("test_schema",),  # it asks where tensors lie
    # Its table points into its other arguments, which must not be copied.
    "symmetric_adam_from_table_": ("test_autograd_registration",),
}
