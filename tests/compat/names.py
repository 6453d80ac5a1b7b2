"""Every public name of the Ascend packages, by the module that has it."""

from __future__ import annotations

import importlib
from typing import Any

from torchgraft.compat import fused
from torchgraft.errors import NotOnThisDevice

OPERATORS = sorted({name.partition(".")[0] for name in fused.NAMES})
NAMES = {
    "torchair": "CompilerConfig dynamo_export get_compiler get_npu_backend logger "
    "use_internal_format_weight register_fx_node_ge_converter patch_for_hcom register_replacement "
    "npu_format_cast_via_cpu",
    "torchair.ge": "custom_op Const Cast Clone DataType Format Tensor TensorSpec",
    "torchair.ge.attr": "Bool DataType Float Int ListBool ListDataType ListFloat ListInt "
    "ListListFloat ListListInt ListStr Str",
    "torchair.inference": "cache_compile readable_cache set_dim_gears",
    "torchair.llm_datadist": "create_npu_tensors",
    "torchair.ops": "npu_print npu_create_tagged_event npu_tagged_event_record "
    "npu_tagged_event_wait npu_record_tagged_stream npu_fused_infer_attention_score "
    "npu_fused_infer_attention_score_v2 record wait",
    "torchair.scope": "npu_wait_tensor npu_stream_switch super_kernel limit_core_num "
    "op_never_timeout data_dump",
    "torchair.configs.compiler_config": "CompilerConfig",
    "torchair.core.utils": "logger EVENT_LEVEL",
    "torchair.tools.gegraph_check.align_trace": "align_trace_json",
    "torchair.tools.gegraph_check.deadlock_check": "deadlock_check",
    "torchair.tools.gegraph_check.filter_operators": "filter_comm_ops",
    "torchair.ge_concrete_graph.ge_apis": "Const Cast Clone custom_op Add MatMul",
    "torchair.ge_concrete_graph.ge_graph": "Tensor TensorSpec DataType Const "
    "auto_convert_to_tensor get_default_ge_graph next_unique_name get_invalid_desc "
    "compat_as_bytes compat_as_bytes_list",
    "torchair.ge_concrete_graph.fx2ge_converter": "register_fx_node_ge_converter declare_supported",
    "torchair.ge_concrete_graph.supported_declaration": "Support declare_supported F32 F16 T",
    "torchair.ge_concrete_graph.utils": "dtype_promote",
    "torchair._ge_concrete_graph.ge_apis": "Const Cast Clone custom_op Add MatMul",
    "torchair._ge_concrete_graph.fx2ge_converter": "register_fx_node_ge_converter "
    "declare_supported",
    "torchair._ge_concrete_graph.utils": "dtype_promote",
    "torchair.ge._ge_graph": "Tensor TensorSpec DataType Const",
    "npugraph_ex": "CompilerConfig compile_fx get_compiler get_npu_backend register_replacement",
    "torch_aie": "compile export_engine set_device finalize Input PrecisionPolicy TensorFormat "
    "dtype CompileMode npu _enums",
    "torch_aie._enums": "PrecisionPolicy TensorFormat dtype",
    "torch_aie._compile_spec": "SUPPORT_SOC_NAME",
    "torch_aie.npu": "Stream stream default_stream current_stream set_stream synchronize",
    "mindietorch": "compile export_engine set_device finalize Input PrecisionPolicy TensorFormat "
    "dtype CompileMode npu _enums",
    "mindietorch._enums": "PrecisionPolicy TensorFormat dtype",
    "mindietorch._compile_spec": "SUPPORT_SOC_NAME",
    "mindietorch.npu": "Stream stream default_stream current_stream set_stream synchronize",
    "torch_npu": f"npu profiler get_npu_format npu_format_cast {' '.join(OPERATORS)} "
    "npu_scatter_nd_update_ npu_silu_ _npu_reshape_and_cache npu_mm_all_reduce_base",
    "torch_npu.npu": "Stream Event stream current_stream default_stream set_stream synchronize "
    "set_device current_device device_count device is_available get_device_name "
    "get_device_properties memory_allocated max_memory_allocated memory_reserved "
    "max_memory_reserved memory_stats reset_peak_memory_stats empty_cache mem_get_info "
    "manual_seed manual_seed_all get_rng_state set_rng_state amp set_compile_mode set_option "
    "config set_stream_limit get_stream_limit NPUGraph graph graph_pool_handle "
    "is_current_stream_capturing graph_task_group_begin graph_task_group_end "
    "graph_task_update_begin graph_task_update_end mstx set_per_process_memory_fraction "
    "ExternalEvent make_graphed_callables get_soc_version",
    "torch_npu.profiler": "profile schedule tensorboard_trace_handler ProfilerActivity "
    "ProfilerAction ProfilerLevel AiCMetrics ExportType _ExperimentalConfig",
    "torch_npu.utils.cpp_extension": "NpuExtension",
    "torch_npu.optim": "NpuFusedAdam NpuFusedAdamW NpuFusedSGD",
    "torch_npu.testing.testcase": "TestCase run_tests",
    "torch_npu.testing.common_utils": "SupportedDevices",
    "torch_npu.meta._meta_registrations": "m",
    "torch_npu.op_plugin.meta._meta_registrations": "m",
}
IDLE = {
    "torchair.use_internal_format_weight",
    "torchair.patch_for_hcom",
    "torchair.scope.super_kernel",
    "torchair.scope.limit_core_num",
    "torchair.scope.op_never_timeout",
    "torchair.scope.data_dump",
    "torch_npu.npu_format_cast",
    "torch_npu.npu.set_compile_mode",
    "torch_npu.npu.set_option",
    "torch_npu.npu.config",
    "torch_npu.npu.set_stream_limit",
    "torch_npu.npu.mstx",
    "torch_npu.npu.set_per_process_memory_fraction",
    "torch_npu.profiler.AiCMetrics",
    "torch_npu.profiler._ExperimentalConfig",
}
"""Those that are taken, checked, and change nothing here."""


def state(module: str, name: str) -> str:
    """`works`, `idle` or `refused`; raises where a name is just not there."""
    held: Any = importlib.import_module(module)
    try:
        getattr(held, name)
    except NotOnThisDevice:
        return "refused"
    return "idle" if f"{module}.{name}" in IDLE else "works"
