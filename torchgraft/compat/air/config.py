"""`CompilerConfig`: TorchAir's tree of options, and the `graft.Config` that one means."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from torchgraft.compat.notes import without_effect
from torchgraft.compat.options import (
    Kind,
    Section,
    anything,
    existing,
    flag,
    function,
    idle,
    instance,
    one_of,
    path,
    text,
    whole,
)
from torchgraft.errors import NotOnThisDevice

Sections = dict[str, type[Section]]
Options = dict[str, Kind]
_PROVED = "streams are ordered and proved by torchgraft at every compile"
_FRESH = "a captured graph here never hands out memory that its next call writes"
_EXACT = "the program's result is the same either way"


class _GraphDump(Section):
    options: ClassVar[Options] = {
        "type": Kind(None, one_of("txt", "pbtxt", "py", None)),
        "path": Kind(None, path),
    }


class _DataDump(Section):
    options: ClassVar[Options] = {
        "type": Kind(None, one_of("npy", None)),
        "path": Kind(None, path),
        "filter": Kind(None, function),
    }


class _FxSummary(Section):
    options: ClassVar[Options] = {
        "type": Kind(None, one_of("csv", None)),
        "skip_compile": Kind(True, flag),
    }


class _DebugAclGraph(Section):
    options: ClassVar[Options] = {
        "disable_reinplace_inplaceable_ops_pass": idle(False, flag, _EXACT),
        "disable_reinplace_input_mutated_ops_pass": idle(False, flag, _EXACT),
        "disable_mempool_reuse_in_same_fx": idle(False, flag, _EXACT),
        "enable_output_clone": idle(False, flag, _FRESH),
        "clone_input": idle(True, flag, _FRESH),
        "remove_cat_ops": idle(True, flag, _EXACT),
        "static_capture_size_limit": idle(64, whole(1), "shapes are not captured one by one"),
    }


class _Debug(Section):
    options: ClassVar[Options] = {
        "run_eagerly": Kind(False, flag),
        "deadlock_check": idle(False, flag, _PROVED),
    }
    sections: ClassVar[Sections] = {
        "graph_dump": _GraphDump,
        "data_dump": _DataDump,
        "fx_summary": _FxSummary,
        "aclgraph": _DebugAclGraph,
    }


class _Aoe(Section):
    options: ClassVar[Options] = {
        "aoe_mode": idle(None, one_of("2", None)),
        "work_path": idle("./", existing("folder")),
        "aoe_config_file": idle(None, existing("file")),
    }


class _ExportExperimental(Section):
    options: ClassVar[Options] = {
        "enable_record_nn_module_stack": idle(False, flag, "it is always recorded"),
        "auto_atc_config_generated": idle(False, flag),
        "enable_lite_export": idle(False, flag),
    }


class _Export(Section):
    options: ClassVar[Options] = {
        "export_mode": Kind(False, flag),
        "export_path_dir": Kind("./", path),
        "export_name": Kind(None, instance(str)),
        "weight_name": idle(None, anything, "weights are inside the exported file"),
        "inputs_name": idle(None, anything, "inputs have the names of the model's arguments"),
    }
    sections: ClassVar[Sections] = {"experimental": _ExportExperimental}


class _Dump(Section):
    options: ClassVar[Options] = {
        "enable_dump": Kind(False, flag),
        "dump_path": Kind("./", existing("folder")),
        "dump_mode": Kind("all", one_of("input", "output", "all")),
        "dump_data": idle("tensor", one_of("tensor", "stats"), "tensors are written whole"),
        "data_dump_stage": idle("optimized", one_of("original", "optimized"), "optimized it is"),
        "quant_dumpable": idle(False, flag),
        "dump_step": Kind("", text(r"(\d+(-\d+)?(\|\d+(-\d+)?)*)?")),
        "dump_layer": Kind("", text(r'[0-9a-zA-Z_" "/\.]*')),
        "dump_config_path": idle(None, existing("json")),
    }


class _Fusion(Section):
    options: ClassVar[Options] = {"fusion_switch_file": idle(None, existing("file"))}


class _ExperimentalAclGraph(Section):
    options: ClassVar[Options] = {
        "_aclnn_static_shape_kernel": idle(False, flag),
        "_aclnn_static_shape_kernel_build_dir": idle(None, instance(str)),
        "_aclnn_static_shape_kernel_sym_value_range": idle(None, instance(list, tuple)),
        "_aclnn_static_shape_kernel_sym_index": idle(0, whole(0)),
        "_super_kernel_optimize": idle(False, flag),
        "_super_kernel_optimize_options": idle(None, instance(dict)),
        "_super_kernel_debug_options": idle(None, instance(dict)),
    }


class _Experimental(Section):
    options: ClassVar[Options] = {
        "cc_parallel_enable": idle(False, flag),
        "memory_efficiency": idle(False, flag),
        "frozen_parameter": idle(False, flag, "behind torch.compile weights are never frozen"),
        "npu_fx_pass": idle(False, flag, "fusions are patterns here: graft.fusions"),
        "aot_config_enable_joint_graph": idle(False, flag, _EXACT),
        "enable_ref_data": idle(False, flag),
        "tiling_schedule_optimize": idle(False, flag),
        "keep_inference_input_mutations": idle(True, flag, _EXACT),
        "enable_view_optimize": idle(True, flag, _EXACT),
        "remove_noop_ops": idle(True, flag, _EXACT),
        "pattern_fusion_pass": Kind(True, flag),
        "static_model_ops_lower_limit": idle(None, whole(-1)),
        "jit_compile": idle("auto", one_of("auto")),
        "topology_sorting_strategy": idle("DFS", one_of("BFS", "DFS", "RDFS", "StableRDFS")),
        "aot_config_output_loss_index": idle(0, anything, _EXACT),
    }
    sections: ClassVar[Sections] = {"aclgraph": _ExperimentalAclGraph}


class _Inference(Section):
    options: ClassVar[Options] = {
        "dynamic_gears_merge_policy": Kind("zip", one_of("zip", "product"))
    }


class _Ge(Section):
    options: ClassVar[Options] = {
        "enable_single_stream": idle(False, flag),
        "oo_level": idle("O3", one_of("O1", "O3")),
        "oo_constant_folding": idle(None, flag),
        "oo_dead_code_elimination": idle(None, flag),
        "export_compile_stat": idle("2", one_of("0", "1", "2"), "see graft.reports()"),
        "aicore_num": idle(None, instance(str, int)),
        "optimization_switch": idle(None, text(r"[^:;]+:(on|off)(;[^:;]+:(on|off))*;?")),
    }


class _AclGraph(Section):
    options: ClassVar[Options] = {
        "use_custom_pool": idle(None, anything, "memory belongs to the program")
    }


class CompilerConfig(Section):
    """How TorchAir compiles. Values are checked when set; each object has its own."""

    options: ClassVar[Options] = {
        "mode": Kind("max-autotune", one_of("max-autotune", "reduce-overhead", "npugraph_ex")),
        "post_grad_custom_pre_pass": Kind(None, function),
        "post_grad_custom_post_pass": Kind(None, function),
    }
    sections: ClassVar[Sections] = {
        "debug": _Debug,
        "aoe_config": _Aoe,
        "export": _Export,
        "dump_config": _Dump,
        "fusion_config": _Fusion,
        "experimental_config": _Experimental,
        "inference_config": _Inference,
        "ge_config": _Ge,
        "aclgraph_config": _AclGraph,
    }

    def as_dict(self) -> NoReturn:
        """The options as the NPU's compiler spells them."""
        raise NotOnThisDevice("CompilerConfig.as_dict", "Use repr(config): it has what was set.")

    @property
    def npugraphex_config(self) -> NoReturn:
        """What only npugraph_ex heeds."""
        raise NotOnThisDevice(
            "CompilerConfig.npugraphex_config", 'Use backend="npugraph_ex" with options={...}.'
        )


class NpuGraphExConfig(Section):
    """The flat options of npugraph_ex."""

    options: ClassVar[Options] = {
        "force_eager": Kind(False, flag),
        "use_graph_pool": idle(None, anything, "memory belongs to the program"),
        "reuse_graph_pool_in_same_fx": idle(True, flag, _EXACT),
        "capture_limit": idle(64, whole(1), "shapes are not captured one by one"),
        "clone_input": idle(True, flag, _FRESH),
        "clone_output": idle(False, flag, _FRESH),
        "disable_static_kernel_compile_cache": idle(False, flag),
        "static_kernel_compile": idle(False, flag),
        "frozen_parameter": idle(False, flag, "behind torch.compile weights are never frozen"),
        "remove_noop_ops": idle(True, flag, _EXACT),
        "remove_cat_ops": idle(True, flag, _EXACT),
        "inplace_pass": idle(True, flag, _EXACT),
        "input_inplace_pass": idle(True, flag, _EXACT),
        "pattern_fusion_pass": Kind(True, flag),
        "post_grad_custom_pre_pass": Kind(None, function),
        "post_grad_custom_post_pass": Kind(None, function),
        "dump_tensor_data": Kind(False, flag),
        "data_dump_stage": idle("optimized", one_of("optimized", "original"), "optimized it is"),
        "data_dump_dir": Kind("./", existing("folder")),
        "_vllm_aclnn_static_kernel_sym_index": idle(0, whole(0)),
        "_vllm_aclnn_static_kernel_sym_range": idle(None, instance(list, tuple)),
        "super_kernel_optimize": idle(False, flag),
        "super_kernel_optimize_options": idle(None, instance(dict)),
        "super_kernel_debug_options": idle(None, instance(dict)),
        "deadlock_check": idle(False, flag, _PROVED),
        "capture_error_mode": idle("global", one_of("global", "thread_local", "relaxed")),
        "force_recapture": idle(False, flag, _FRESH),
    }


_TORCHAIR = {
    "force_eager": "debug.run_eagerly",
    "pattern_fusion_pass": "experimental_config.pattern_fusion_pass",
    "post_grad_custom_pre_pass": "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass": "post_grad_custom_post_pass",
    "dump_tensor_data": "dump_config.enable_dump",
    "data_dump_dir": "dump_config.dump_path",
}
"""Options of npugraph_ex, and what they are called in TorchAir's tree."""


def as_torchair(config: NpuGraphExConfig) -> CompilerConfig:
    """The same as TorchAir's config, whose pipeline is the only one here."""
    result = CompilerConfig()
    result.mode = "npugraph_ex"
    return _over(result, config, _TORCHAIR)


def with_options(config: CompilerConfig, options: Mapping[str, Any]) -> CompilerConfig:
    """A copy of a config that `torch.compile(options=...)` has changed."""
    given = from_options(options)
    without_effect("npugraph_ex.", given.idle())
    return _over(copy.deepcopy(config), given, options)


def _over(config: CompilerConfig, given: NpuGraphExConfig, names: Iterable[str]) -> CompilerConfig:
    for name in _TORCHAIR.keys() & set(names):
        *groups, last = _TORCHAIR[name].split(".")
        setattr(functools.reduce(getattr, groups, config), last, getattr(given, name))
    return config


def from_options(
    options: Mapping[str, Any], base: NpuGraphExConfig | None = None
) -> NpuGraphExConfig:
    """What `torch.compile(options=...)` holds, as a config of its own; the rest is `base`'s."""
    config = NpuGraphExConfig() if base is None else copy.deepcopy(base)
    for name, value in options.items():
        if name not in config.options:
            allowed = list(config.options)
            raise ValueError(f"Invalid option '{name}', allowed options: {allowed}")
        setattr(config, name, value)
    return config
