"""The signatures of the real packages' functions, and how ours differ."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

_OPTIM = {
    "NpuFusedAdadelta": "params, lr=1.0, rho=0.9, eps=1e-06, weight_decay=0",
    "NpuFusedAdam": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, "
    "amsgrad=False",
    "NpuFusedAdamW": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, "
    "amsgrad=False",
    "NpuFusedRMSprop": "params, lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0, momentum=0, "
    "centered=False",
}
_ALONE = (
    "current_device device_count empty_cache get_allocator_backend get_amp_supported_dtype "
    "get_autocast_dtype get_mm_bmm_format_nd get_rng_state_all get_sync_debug_mode "
    "graph_pool_handle init initial_seed is_autocast_enabled is_available is_bf16_supported "
    "is_current_stream_capturing is_initialized is_jit_compile_false seed seed_all"
)
_OF_DEVICE = (
    "current_stream default_stream get_device_capability max_memory_allocated max_memory_cached "
    "max_memory_reserved mem_get_info memory_allocated memory_cached memory_reserved memory_stats "
    "memory_stats_as_nested_dict reset_accumulated_memory_stats reset_max_memory_allocated "
    "reset_max_memory_cached reset_peak_memory_stats synchronize"
)
_AIE = {
    "compile": "module, ir='default', inputs=None, **kwargs",
    "export_engine": "module, method_name='forward', ir='default', inputs=None, **kwargs",
    "set_device": "npu_id",
    "finalize": "",
}
SIGNATURES = {
    "torchair.get_npu_backend": "*, compiler_config=None, custom_decompositions={}",
    "torchair.get_compiler": "compiler_config=None",
    "torchair.dynamo_export": "*args, model, export_path='export_file', export_name='export', "
    "dynamic=False, config=..., **kwargs",
    "torchair.use_internal_format_weight": "model",
    "torchair.patch_for_hcom": "",
    "torchair.register_fx_node_ge_converter": "aten_op",
    "torchair.register_replacement": "search_fn, replace_fn, example_inputs, trace_fn=..., "
    "extra_check=..., search_fn_pattern=None, scalar_workaround=None, skip_duplicates=False",
    "torchair.ge.custom_op": "op_type, *args, inputs=None, outputs=None, attrs=None, "
    "node_name=None",
    "torchair.ge.Const": "v, dtype=None, node_name=None, readable=True",
    "torchair.ge.Cast": "x, *, dst_type, dependencies=[], node_name=None",
    "torchair.inference.cache_compile": "func, *, config=None, dynamic=True, cache_dir=None, "
    "global_rank=None, tp_rank=None, pp_rank=None, backend=None, ge_cache=False, "
    "custom_decompositions=None",
    "torchair.inference.readable_cache": "cache_bin, print_output=True, file=None",
    "torchair.inference.set_dim_gears": "t, dim_gears",
    "torchair.ops.npu_print": "*args, summarize_size=3, tensor_detail=False",
    "torchair.ops.npu_create_tagged_event": "tag",
    "torchair.scope.npu_stream_switch": "stream_tag, stream_priority=0, enable_inner_parallel=True",
    "torchair.scope.npu_wait_tensor": "self, dependency",
    "torchair.scope.super_kernel": "scope, options=''",
    "torchair.scope.limit_core_num": "op_aicore_num, op_vectorcore_num",
    "torchair.scope.op_never_timeout": "enable=True",
    "torchair.scope.data_dump": "",
    "npugraph_ex.compile_fx": "gm, example_inputs=None, options=None",
    **{f"torch_aie.{name}": text for name, text in _AIE.items()},
    **{f"mindietorch.{name}": text for name, text in _AIE.items()},
    **{f"torch_npu.optim.{name}": text for name, text in _OPTIM.items()},
    **{f"torch_npu.npu.{name}": "" for name in _ALONE.split()},
    **{f"torch_npu.npu.{name}": "device=None" for name in _OF_DEVICE.split()},
    "torch_npu.npu.Event": "enable_timing=False, blocking=False, interprocess=False",
    "torch_npu.npu.Stream": "device=None, priority=0, **kwargs",
    "torch_npu.npu.graph": "npu_graph, pool=None, stream=None, capture_error_mode='global'",
    "torch_npu.npu.graph_task_group_begin": "stream",
    "torch_npu.npu.graph_task_group_end": "stream",
    "torch_npu.npu.graph_task_update_begin": "stream, handle",
    "torch_npu.npu.graph_task_update_end": "stream",
    "torch_npu.npu.device": "device",
    "torch_npu.npu.device_of": "obj",
    "torch_npu.npu.enable_deterministic_with_backward": "tensor",
    "torch_npu.npu.disable_deterministic_with_backward": "tensor",
    "torch_npu.npu.manual_seed": "seed",
    "torch_npu.npu.manual_seed_all": "seed",
    "torch_npu.npu.memory_summary": "device=None, abbreviated=False",
    "torch_npu.npu.mstx.mark": "message=''",
    "torch_npu.npu.mstx.range_start": "message, stream=None",
    "torch_npu.npu.mstx.range_end": "range_id",
    "torch_npu.npu.mstx.mstx_range": "message, stream=None",
    "torch_npu.npu.set_autocast_dtype": "dtype",
    "torch_npu.npu.set_autocast_enabled": "enable",
    "torch_npu.npu.set_compile_mode": "jit_compile=False",
    "torch_npu.npu.set_device": "device",
    "torch_npu.npu.set_mm_bmm_format_nd": "is_nd=True",
    "torch_npu.npu.set_option": "option",
    "torch_npu.npu.set_per_process_memory_fraction": "fraction, device=None",
    "torch_npu.npu.get_rng_state": "device='npu'",
    "torch_npu.npu.set_rng_state": "new_state, device='npu'",
    "torch_npu.npu.set_rng_state_all": "new_states",
    "torch_npu.npu.set_stream": "stream",
    "torch_npu.npu.set_sync_debug_mode": "debug_mode",
    "torch_npu.npu.stream": "stream",
    "torch_npu.npu.amp.GradScaler": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, "
    "growth_interval=2000, dynamic=True, enabled=True",
    "torch_npu.npu.amp.autocast": "enabled=True, dtype=torch.float16, cache_enabled=True",
    "torch_npu.npu.amp.custom_fwd": "fwd=None, **kwargs",
    "torch_npu.npu.amp.custom_bwd": "bwd",
    "torch_npu.profiler.profile": "*, activities=None, schedule=None, on_trace_ready=None, "
    "record_shapes=False, profile_memory=False, with_stack=False, with_flops=False, "
    "with_modules=False, experimental_config=None, use_cuda=None",
    "torch_npu.profiler.schedule": "wait, active, warmup=0, repeat=0, skip_first=0",
    "torch_npu.profiler.tensorboard_trace_handler": "dir_name=None, worker_name=None, "
    "analyse_flag=True",
    "torch_npu.testing.common_utils.create_common_tensor": "item, minValue, maxValue, device=None",
    "torch_npu.testing.common_utils.create_dtype_tensor": "shape, dtype, npu_format=-1, "
    "min_value=-5, max_value=5, no_zero=False, device=None",
    "torch_npu.utils.cpp_extension.NpuExtension": "name, sources, *args, **kwargs",
}
"""By name: the parameters. A default of `...` is an object that cannot be written down."""


def find(full: str) -> Any:
    """What a dotted name is."""
    head, *rest = full.split(".")
    held: Any = importlib.import_module(head)
    walked = head
    for part in rest:
        walked += f".{part}"
        held = getattr(held, part, None) or importlib.import_module(walked)
    return held


def differences(full: str, text: str) -> Iterator[str]:
    """What a caller by the real signature would not get from ours."""
    wanted = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(wanted, ast.FunctionDef)
    ours = inspect.signature(find(full)).parameters
    takes = {one.kind for one in ours.values()}
    order = [name for name, one in ours.items() if one.kind in _BY_POSITION]
    positional = [*wanted.args.posonlyargs, *wanted.args.args]
    defaults = [None] * (len(positional) - len(wanted.args.defaults)) + wanted.args.defaults
    for place, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        if arg.arg not in ours and place < len(order):
            yield f"{arg.arg}: called {order[place]} here"
        elif arg.arg not in ours:
            if not takes >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                yield f"{arg.arg}: not there"
        elif order.index(arg.arg) != place:
            yield f"{arg.arg}: in another place"
        else:
            yield from _default(arg.arg, default, ours[arg.arg].default)
    for arg, default in zip(wanted.args.kwonlyargs, wanted.args.kw_defaults, strict=True):
        if arg.arg in ours:
            yield from _default(arg.arg, default, ours[arg.arg].default)
        elif inspect.Parameter.VAR_KEYWORD not in takes:
            yield f"{arg.arg}: not there"


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _default(name: str, wanted: ast.expr | None, ours: Any) -> Iterator[str]:
    text = "no default" if wanted is None else ast.unparse(wanted)
    shown = "no default" if ours is inspect.Parameter.empty else repr(ours)
    empty = text in ("[]", "{}") and ours in (None, ())  # a default that nobody can change
    if text not in ("...", shown) and not empty:
        yield f"{name}: {shown}, and there {text}"
