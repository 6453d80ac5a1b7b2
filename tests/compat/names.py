"""Every public name of the Ascend packages, by the module that has it."""

from __future__ import annotations

import importlib
from typing import Any

from torchgraft.compat import common, fused, paths, refused, typed
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
    "torch_npu": f"npu profiler contrib distributed jit optim testing utils version "
    f"get_npu_format npu_format_cast npu_format_cast_ empty_with_format unsafe_empty_with_format "
    f"copy_memory_ get_storage_size empty_with_swapped_memory {' '.join(OPERATORS)} "
    f"npu_scatter_nd_update_ npu_silu_ scatter_update_ _npu_reshape_and_cache "
    f"{' '.join(refused.FUSED)}",
    "torch_npu.npu": "Stream Event ExternalStream ExternalEvent SyncLaunchStream StreamContext "
    "stream current_stream default_stream set_stream synchronize set_device current_device "
    "device_count device device_of is_available is_initialized init get_device_name "
    "get_device_properties get_device_capability can_device_access_peer memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "memory_stats memory_stats_as_nested_dict memory_summary memory_snapshot "
    "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats empty_cache host_empty_cache mem_get_info manual_seed "
    "manual_seed_all seed seed_all initial_seed get_rng_state set_rng_state get_rng_state_all "
    "set_rng_state_all default_generators amp set_compile_mode set_option config matmul conv "
    "set_stream_limit get_stream_limit reset_stream_limit set_device_limit get_device_limit "
    "NPUGraph graph graph_pool_handle is_current_stream_capturing graph_task_group_begin "
    "graph_task_group_end graph_task_update_begin graph_task_update_end make_graphed_callables "
    "mstx set_per_process_memory_fraction get_soc_version get_amp_supported_dtype "
    "get_autocast_dtype set_autocast_dtype is_autocast_enabled set_autocast_enabled "
    "is_bf16_supported is_jit_compile_false is_support_inf_nan get_allocator_backend "
    "set_sync_debug_mode get_sync_debug_mode set_mm_bmm_format_nd get_mm_bmm_format_nd "
    "enable_deterministic_with_backward disable_deterministic_with_backward "
    f"{' '.join(typed.NAMES)} {' '.join(common.REFUSED)} aclnn backends "
    f"{' '.join(paths.ALIASES['torch_npu.npu'])}",
    "torch_npu.npu.amp": "autocast GradScaler custom_fwd custom_bwd autocast_mode common "
    "grad_scaler",
    "torch_npu.npu.aclnn": "version",
    "torch_npu.npu.utils": "npu_check_overflow get_cann_version set_device",
    "torch_npu.npu.memory": "empty_cache MemPool",
    "torch_npu.npu.graphs": "NPUGraph graph",
    "torch_npu.npu.streams": "Stream Event",
    "torch_npu.npu.random": "manual_seed",
    "torch_npu.contrib": "Prefetcher NpuDropPath ROIAlign roll npu_multiclass_nms",
    "torch_npu.contrib.module": "DropoutWithByteMask MultiheadAttention",
    "torch_npu.contrib.module.roi_align": "ROIAlign",
    "torch_npu.contrib.function": "npu_fused_attention",
    "torch_npu.contrib.function.nms": "npu_multiclass_nms",
    "torch_npu.distributed": "is_available is_hccl_available reinit_process_group "
    "reduce_scatter_tensor_uneven all_gather_into_tensor_uneven ParallelStore distributed_c10d",
    "torch_npu.distributed.distributed_c10d": "is_hccl_available",
    "torch_npu.distributed.rpc.options": "NPUTensorPipeRpcBackendOptions",
    "torch_npu.distributed.run": "main",
    "torch_npu.dynamo.torchair": "CompilerConfig get_npu_backend",
    "torch_npu.dynamo.torchair.ge.ge_custom": "custom_op",
    "torchair.npu_export": "dynamo_export",
    "torchair.npu_fx_compiler": "get_compiler get_npu_backend",
    "torchair.experimental.inference": "use_internal_format_weight",
    "torch_npu.jit": "optimize",
    "torch_npu.jit.fusion_pass.fast_gelu": "fast_gelu_pass",
    "torch_npu.profiler": "profile schedule tensorboard_trace_handler ProfilerActivity "
    "ProfilerAction ProfilerLevel AiCMetrics ExportType HostSystem _ExperimentalConfig analyse "
    "supported_activities supported_ai_core_metrics supported_export_type supported_profiler_level "
    "dynamic_profile",
    "torch_npu.profiler.dynamic_profile": "init start step",
    "torch_npu.profiler.experimental_config": "_ExperimentalConfig ProfilerLevel",
    "torch_npu.profiler.profiler": "profile analyse _KinetoProfile",
    "torch_npu.profiler.scheduler": "Schedule ProfilerAction",
    "torch_npu.utils": "cpp_extension save_async npu_combine_tensors FlopsCounter collect_env",
    "torch_npu.utils.cpp_extension": "NpuExtension",
    "torch_npu.utils.serialization": "load save save_async",
    "torch_npu.utils.syncbatchnorm": "SyncBatchNorm",
    "torch_npu.version": "__version__",
    "torch_npu.optim": "NpuFusedAdam NpuFusedAdamW NpuFusedSGD NpuFusedAdadelta NpuFusedRMSprop "
    "NpuFusedAdamP NpuFusedLamb NpuFusedBertAdam NpuFusedRMSpropTF NpuFusedOptimizerBase",
    "torch_npu.optim.npu_fused_adam": "NpuFusedAdam",
    "torch_npu.testing.decorator": "instantiate_tests",
    "torch_npu.testing.common_distributed": "with_comms",
    "torch_npu.testing.testcase": "TestCase run_tests",
    "torch_npu.testing.common_utils": "SupportedDevices create_common_tensor create_dtype_tensor "
    "freeze_rng_state get_npu_device set_npu_device is_iterable check_operators_in_prof "
    "iter_indices",
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
    "torch_npu.npu_format_cast_",
    "torch_npu.npu.matmul",
    "torch_npu.npu.conv",
    "torch_npu.npu.set_device_limit",
    "torch_npu.npu.set_sync_debug_mode",
    "torch_npu.npu.set_mm_bmm_format_nd",
    "torch_npu.npu.enable_deterministic_with_backward",
    "torch_npu.profiler.analyse",
    "torch_npu.profiler.HostSystem",
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
