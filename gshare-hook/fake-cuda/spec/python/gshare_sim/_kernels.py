"""A CPU kernel for every operator with a CUDA kernel, PyTorch's own and those of libraries."""

from __future__ import annotations

import re
from typing import Any, Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import NotComputed, _device, _forms, _memory, _random
from ._memory import CPU, on_device, twin

# Their CUDA implementations launch no kernel: memory, and questions of the host. Views are found by their schema.
NATIVE = frozenset(
    "empty.memory_format empty_strided resize_ set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor "
    "_local_scalar_dense record_stream is_set_to _efficientzerotensor".split()
)
# The same for sparse tensors, whose parts are tensors of the kinds above.
NATIVE_SPARSE = frozenset(
    "_dimI _dimV _nnz dense_dim sparse_dim is_coalesced empty.memory_format empty_like clone zeros.out copy_ zero_ resize_ _coalesced_ "
    "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors copy_sparse_to_sparse_ resize_as_sparse_ sparse_resize_ "
    "sparse_resize_and_clear_".split()
)
# Registered for all devices, they would choose cuDNN's kernels, or start one of PyTorch's by themselves.
ALSO = ("convolution", "convolution_backward", "_convolution", "mode.values", "conj_physical_")
# Arguments on the CPU are as good as on the device.
MIXED = frozenset("index index_put_ _index_put_impl_ _ctc_loss _pack_padded_sequence copy_".split())


class Arguments:
    """The arguments of a call as tensors of the host."""

    __slots__ = ("device", "elements", "has_number", "has_sparse", "mixed")

    def __init__(self, mixed: bool) -> None:
        self.device = -1
        self.elements = 0
        self.mixed = mixed
        # Whether a number stands for a tensor.
        self.has_number = False
        self.has_sparse = False

    def host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_cuda:
                device = value.get_device()
                if device != self.device:
                    if self.device >= 0 and not self.mixed:
                        self.differ(f"cuda:{device}")
                    self.device = device
                if value.layout is torch.strided:
                    self.elements = max(self.elements, value.numel())
                else:
                    self.has_sparse = True
                    self.elements = max(self.elements, value._nnz())
                return twin(value)
            if value.dim() and not self.mixed:
                self.differ("cpu")
            return value
        if isinstance(value, (list, tuple)):
            return [self.host(each) for each in value]
        if isinstance(value, torch.device):
            self.device = torch.cuda.current_device() if value.index is None else value.index
            return CPU
        if isinstance(value, (int, float, complex)):
            self.has_number = True
        return value

    def differ(self, other: str) -> None:
        mine = f"cuda:{max(self.device, 0)}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {mine} and {other}!")


def overload(name: str) -> OpOverload:
    """`aten::add.Tensor` as an object; without a namespace it is PyTorch's."""
    space, _, short = name.rpartition("::")
    packet, _, which = short.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, space or "aten"), packet), which or "default")
    return found


def _sized(out: Tensor, result: Tensor) -> Tensor:
    """A tensor of the caller for a result, whose size it takes as on CUDA."""
    return out if out.size() == result.size() else out.resize_(result.size())


def _lacking(error: str, values: list[Any]) -> torch.dtype | None:
    """The narrow type that a CPU kernel lacks, if it is the type of all its numbers: float32, rounded once, gives what a GPU gives."""
    found = re.search("not implemented for '(Half|BFloat16)'", error)
    if found is None or any(isinstance(value, torch.dtype) for value in values):
        return None
    narrow = torch.float16 if found[1] == "Half" else torch.bfloat16
    types = {each.dtype for each in _memory.flat(values) if each.is_floating_point()}
    return narrow if types == {narrow} else None


def _cast(value: Any, of: torch.dtype, to: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(to) if value.dtype is of else value
    return type(value)(_cast(each, of, to) for each in value) if isinstance(value, (list, tuple)) else value


def kernel_of(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA kernel of an operator; `run` makes its values on the host."""
    schema, tags = op._schema, op.tags
    space, _, name = schema.name.partition("::")
    label = f"{name}.{schema.overload_name}" if schema.overload_name else name
    mixed = name in MIXED
    position = {argument.name: i for i, argument in enumerate(schema.arguments)}
    held = [any(kind in str(argument.type) for kind in ("Tensor", "Device")) for argument in schema.arguments]
    written = [argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    by_set = {each: argument.name for argument in written for each in argument.alias_info.before_set}
    # A library's own operator may read such an argument, too.
    outs = [argument.name for argument in written if argument.kwarg_only and space == "aten"]
    # For each result the argument that it is, or None for a new tensor.
    given = [None if each.alias_info is None else by_set[next(iter(each.alias_info.before_set))] for each in schema.returns]
    # The forms draw no numbers.
    is_random = torch.Tag.nondeterministic_seeded in tags and label not in _forms.FORMS
    sized_by_values = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    timed = 0

    def call(found: Arguments, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if is_random and run is op:
            kwargs = {**kwargs, "generator": kwargs["generator"].for_cpu()}
        # The overload for a number takes its type into account.
        chosen = op.overloadpacket if found.has_number else run
        try:
            return chosen(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) and "Could not run" in str(error):
                raise NotComputed(f"{space}::{label} has no CPU kernel, so it has no values on a simulated GPU") from None
            narrow = None if written else _lacking(str(error), [*args, *kwargs.values()])
            if narrow is None:
                raise
        wide = [_cast(value, narrow, torch.float32) for value in args]
        return _cast(chosen(*wide, **{key: _cast(value, narrow, torch.float32) for key, value in kwargs.items()}), torch.float32, narrow)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal timed
        found = Arguments(mixed)
        host = found.host
        host_args = [host(value) if tensor else value for value, tensor in zip(args, held)]
        host_kwargs = {key: host(value) if held[position[key]] else value for key, value in kwargs.items()} if kwargs else {}
        device = found.device
        if not timed:
            timed = _device.kernel(f"{space}_{label}")
        stream = _device.begin(timed, device, found.elements)
        # A CPU kernel may give these another shape.
        for out in outs:
            if found.has_sparse and any(each.layout is not torch.strided for each in _memory.flat(kwargs[out])):
                raise NotComputed(f"{space}::{label} with a sparse {out}= has no values on a simulated GPU: leave {out}= out")
            host_kwargs[out] = _memory.fresh(kwargs[out])
        if is_random:
            i = position.get("generator", len(args))
            generator = host_args.pop() if i < len(args) else kwargs.get("generator")
            host_kwargs["generator"] = _random.Source(generator, device)
        if sized_by_values:
            # Refused in a capture, as on a GPU.
            _device.wait(device)
        if stream is not None:
            if found.has_sparse:
                raise NotComputed(f"{space}::{label} of sparse tensors cannot be captured on a simulated GPU")
            return capture(stream, found, args, kwargs, host_args, host_kwargs)
        result = call(found, host_args, host_kwargs)
        if given == [None]:
            return on_device(result, device)
        write(outs, kwargs, host_kwargs)
        if found.has_sparse:
            # The twin of a sparse tensor has got other parts.
            for out in written:
                i = position[out.name]
                if not out.kwarg_only and args[i].layout is not torch.strided:
                    args[i].copy_(on_device(host_args[i], device))
        return answer(result, device, args, kwargs)

    def answer(result: Any, device: int, args: Any, kwargs: Any) -> Any:
        results = [result] if len(given) == 1 else result or []
        values = [on_device(value, device) if of is None else argument(of, args, kwargs) for of, value in zip(given, results)]
        return values[0] if len(values) == 1 else tuple(values) or None

    def new(result: Any) -> list[Tensor]:
        """The tensors of a result that are not arguments."""
        results = [result] if len(given) == 1 else result or []
        return [each for of, value in zip(given, results) if of is None for each in _memory.flat(value)]

    def argument(of: str, args: Any, kwargs: Any) -> Any:
        i = position[of]
        return args[i] if i < len(args) else kwargs[of]

    def write(names: list[str], kwargs: Any, host_kwargs: Any) -> None:
        for name in names:
            for out, result in zip(_memory.flat(kwargs[name]), _memory.flat(host_kwargs[name]), strict=True):
                twin(_sized(out, result)).copy_(result)

    def capture(stream: int, found: Arguments, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any) -> Any:
        """A capture changes no bytes: a run on copies tells the shapes."""
        trial = {key: _memory.copied(value) for key, value in host_kwargs.items()}
        if is_random:
            trial["generator"] = _random.Trial(None, found.device)
        values = answer(call(found, [_memory.copied(value) for value in host_args], trial), found.device, args, kwargs)
        targets = [twin(_sized(to, of)) for out in outs for to, of in zip(_memory.flat(kwargs[out]), _memory.flat(trial[out]), strict=True)]
        targets += [twin(each) for each in new(values)]

        def again() -> None:
            own = {**host_kwargs, **{out: _memory.fresh(kwargs[out]) for out in outs}}
            result = call(found, host_args, own)
            sources = [each for out in outs for each in _memory.flat(own[out])] + new(result)
            for to, of in zip(targets, sources, strict=True):
                to.copy_(of)

        _device.record(stream, again)
        return values

    kernel.__name__ = label
    return kernel


def _copy() -> Callable[..., Any]:
    """`copy_` between host and device is the driver's copy; within a device it is that for equal layouts, and else an operator."""
    op = torch.ops.aten.copy_.default
    native = torch.library.get_kernel(op, "CUDA")
    ours = kernel_of(op, op)

    def copy_(keys: Any, self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.is_cuda and source.is_cuda:
            alike = self.dtype == source.dtype and self.size() == source.size() and self.is_contiguous() and source.is_contiguous()
            if not alike or self.is_conj() != source.is_conj() or self.is_neg() != source.is_neg():
                ours(self, source, non_blocking)
                return self
        _device.give_way(source.get_device() if source.is_cuda else self.get_device())
        native.call_boxed(keys, self, source, non_blocking)
        return self

    return copy_


def _compile_by_operators() -> None:
    """The default compiler makes Triton kernels for a GPU, and these need one: the graph's operators run instead, one by one."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    inductor = wrapper.__call__

    def __call__(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        if not any(isinstance(each, Tensor) and each.is_cuda for each in inputs):
            return inductor(self, model, inputs, **options)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(model, inputs)

    wrapper.__call__ = __call__
    # TorchScript's fuser makes kernels by NVRTC.
    torch._C._jit_override_can_fuse_on_gpu(False)


def _of_libraries(built_in: set[str]) -> None:
    """Operators that a library adds to PyTorch get kernels at the first look at its namespace, such as `torch.ops.torchvision`.

    Kernels written in Python stay, since they call operators in turn. An operator without a CPU kernel keeps its own, which the driver
    refuses.
    """
    # An operator's kernel ends with its library object.
    libraries: dict[str, torch.library.Library] = {}
    seen: set[str] = set()
    look_up = torch._ops._OpNamespace.__getattr__

    def add(space: str) -> None:
        fresh = {name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if name.startswith(f"{space}::")} - seen
        seen.update(fresh)
        for name in fresh:
            if _is_python(name) or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                continue
            if space not in libraries:
                libraries[space] = torch.library.Library(space, "IMPL")
            op = overload(name)
            libraries[space].m.impl(name, "CUDA", kernel_of(op, op), False)  # type: ignore[union-attr]

    def __getattr__(self: Any, name: str) -> Any:
        if self.name not in built_in and not name.startswith("__"):
            add(self.name)
        return look_up(self, name)

    torch._ops._OpNamespace.__getattr__ = __getattr__  # type: ignore[method-assign]


def _is_python(name: str) -> bool:
    """Whether an operator's CUDA kernel was registered by Python."""
    return re.search(r"^CUDA: registered at \S*\.py:", torch._C._dispatch_dump(name), re.MULTILINE) is not None


def install() -> torch.library.Library:
    """Registers all kernels. They stay while the library object lives."""
    # Not at the first operator: a library's kernel may come before it.
    _device.begin_process()
    library = torch.library.Library("aten", "IMPL")
    copy = _copy()
    for key, native, also in (("CUDA", NATIVE, ALSO), ("SparseCUDA", NATIVE_SPARSE, ()), ("SparseCsrCUDA", NATIVE_SPARSE, ())):
        for name in (*torch._C._dispatch_get_registrations_for_dispatch_key(key), *also):
            space, _, short = name.rpartition("::")
            if space not in ("", "aten") or short in native:
                continue
            op = overload(short)
            # Views stay.
            if any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns):
                continue
            run = _forms.FORMS.get(short) or _random.FORMS.get(short) or op
            kernel = _forms.ANSWERS.get(short) or kernel_of(op, run)
            library.m.impl(short, key, kernel, False)  # type: ignore[union-attr]
    library.m.impl("copy_", "CUDA", copy, True)  # type: ignore[union-attr]
    _of_libraries({name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()})
    _compile_by_operators()
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return library
