"""Operators that PyTorch has for CUDA only, in terms of others, on the host."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

aten = torch.ops.aten


def _no_dropout(p: float, name: str) -> None:
    if p:
        raise NotImplementedError(f"{name} with dropout has no values on a simulated GPU: use sdpa_kernel(SDPBackend.MATH)")


def _none(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    heads = q.size(1) // k.size(1)
    if heads > 1:
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, sums


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    of = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = of(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def flash(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, debug: bool = False, *, scale: float | None = None) -> Any:
    _no_dropout(p, "flash attention")
    out, sums = _attention(q, k, v, None, causal, scale)
    return out, sums, None, None, q.size(2), k.size(2), _none(), _none(), _none(q.dtype)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, scale: float | None = None) -> Any:
    return _attention_backward(grad, q, k, v, out, sums, None, rest[5], scale)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False, *, scale: float | None = None
) -> Any:
    _no_dropout(p, "memory-efficient attention")
    return (*_attention(q, k, v, mask, causal, scale), _none(), _none())


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor, p: float,
    wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if wanted[3]:
        raise NotImplementedError("memory-efficient attention has no gradient of its mask on a simulated GPU: use sdpa_kernel(SDPBackend.MATH)")
    return (*_attention_backward(grad, q, k, v, out, sums, mask, causal, scale), None)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    _no_dropout(p, "cuDNN's attention")
    out, sum_ = _attention(q, k, v, mask, causal, scale)
    return out, sum_, None, None, q.size(2), k.size(2), _none(), _none(), _none(q.dtype)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor, mask: Tensor | None, *rest: Any,
    scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention_backward(grad, q, k, v, out, sums, mask, rest[5], scale)


def lstm_cell(inputs: Tensor, hiddens: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None) -> Any:
    gates = sum(part for part in (inputs, hiddens, input_bias, hidden_bias) if part is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    c = cy.tanh()
    grad_h = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - c * c) + (0 if grad_cy is None else grad_cy)
    parts = (grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_h * c * o * (1 - o))
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(inputs: Tensor, hiddens: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None) -> Any:
    ir, ii, n = (inputs if input_bias is None else inputs + input_bias).chunk(3, 1)
    hr, hi, hn = (hiddens if hidden_bias is None else hiddens + hidden_bias).chunk(3, 1)
    r, i = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (n + r * hn).tanh()
    return n + i * (hx - n), torch.cat((r, i, n, hx, hn), 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    r, i, n, hx, hn = workspace.chunk(5, 1)
    grad_i = grad_hy * (hx - n) * i * (1 - i)
    grad_n = grad_hy * (1 - i) * (1 - n * n)
    grad_r = grad_n * hn * r * (1 - r)
    inputs, hiddens = torch.cat((grad_r, grad_i, grad_n), 1), torch.cat((grad_r, grad_i, grad_n * r), 1)
    return inputs, hiddens, grad_hy * i, inputs.sum(0) if has_bias else None, hiddens.sum(0) if has_bias else None


def rms_norm_backward(
    grad: Tensor, input: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dims = list(range(-len(shape), 0))
    grad_, normal = grad.to(rstd.dtype), input.to(rstd.dtype) * rstd
    scaled = grad_ if weight is None else grad_ * weight
    of_input = (rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))).to(input.dtype)
    leading = list(range(input.dim() - len(shape)))
    of_weight = (grad_ * normal).sum(leading) if leading else grad_ * normal
    return of_input if wanted[0] else None, of_weight.to(weight.dtype) if weight is not None and wanted[1] else None


def _in(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of matrices in another type."""

    def form(*args: Any, **kwargs: Any) -> Tensor:
        at = next(i for i, value in enumerate(args) if isinstance(value, torch.dtype))
        dtype = args[at]
        return product(*(value.to(dtype) for value in args[:at]), *args[at + 1 :], **kwargs)

    return form


def _softmax(name: str) -> dict[str, Callable[..., Any]]:
    """A softmax and its gradient, where the input is float16 and the result float32."""
    of, backward = getattr(aten, name), getattr(aten, f"{name}_backward_data")

    def form(self: Tensor, dim: int, half_to_float: bool, **out: Tensor) -> Any:
        return of(self.float() if half_to_float else self, dim, False, **out)

    def gradient(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
        return backward(grad, output, dim, grad.dtype).to(dtype)

    return {name: form, f"{name}.out": form, f"{name}_backward_data": gradient}


FORMS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_masked_scale": lambda self, mask, scale: self * mask.to(self.dtype) * scale,
    "_fused_rms_norm_backward": rms_norm_backward,
    **_softmax("_softmax"),
    **_softmax("_log_softmax"),
    **{f"{product.__name__}.{form}": _in(product) for product in (torch.mm, torch.bmm, torch.addmm, torch.baddbmm) for form in ("dtype", "dtype_out")},
}

# Questions of the host: which implementation is chosen. These are the native ones.
ANSWERS: dict[str, Callable[..., Any]] = {
    "_fused_sdp_choice": lambda *_, **__: 0,
    "_use_cudnn_ctc_loss": lambda *_, **__: False,
    "_use_cudnn_ctc_loss.Tensor": lambda *_, **__: False,
    "_use_miopen_ctc_loss": lambda *_, **__: False,
    "_use_miopen_ctc_loss.Tensor": lambda *_, **__: False,
}
