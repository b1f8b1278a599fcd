"""onnxruntime session options: a copy that the runtime may change, because the caller's object is the caller's."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort

_FIELDS = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "execution_mode",
    "execution_order",
    "graph_optimization_level",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
)

# onnxruntime can tell the value of an entry, not which entries there are. These concern the CPU and a model in memory.
_ENTRIES = (
    "memory.enable_memory_arena_shrinkage",
    "mlas.disable_kleidiai",
    "mlas.enable_gemm_fastmath_arm64_bfloat16",
    "mlas.qnbit.force_fp32",
    "mlas.use_lut_gemm",
    "optimization.constant_folding_max_output_size_in_bytes",
    "optimization.disable_specified_optimizers",
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.minimal_build_optimizations",
    "session.allow_released_opsets_only",
    "session.collect_node_memory_stats_to_file",
    "session.debug_layout_transformation",
    "session.disable_aot_function_inlining",
    "session.disable_cpu_ep_fallback",
    "session.disable_double_qdq_remover",
    "session.disable_prepacking",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.dynamic_block_base",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_quant_qdq_cleanup",
    "session.force_spinning_stop",
    "session.function_expansion_byte_limit",
    "session.function_expansion_node_limit",
    "session.graph_optimizations_loop_level",
    "session.inter_op.allow_spinning",
    "session.inter_op.spin_backoff_max",
    "session.inter_op.spin_duration_us",
    "session.intra_op.allow_spinning",
    "session.intra_op.spin_backoff_max",
    "session.intra_op.spin_duration_us",
    "session.intra_op_thread_affinities",
    "session.optimized_model_external_initializers_file_name",
    "session.optimized_model_external_initializers_min_size_in_bytes",
    "session.prepack.enable_parallel",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.record_ep_graph_assignment_info",
    "session.save_external_prepacked_constant_initializers",
    "session.save_model_format",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "session.x64quantprecision",
)

_FOLDER = "session.model_external_initializers_file_folder_path"
_NBITS_ACCURACY = "session.qdq_matmulnbits_accuracy_level"


def copy_options(source: ort.SessionOptions | None) -> ort.SessionOptions:
    """A new object with everything of `source` that onnxruntime lets one read.

    Not readable, so not copied: free-dimension overrides, added initializers, registered custom-operator libraries,
    execution providers, callbacks, and configuration entries that are not in this module's list.
    """
    made = ort.SessionOptions()
    if source is None:
        return made
    for name in _FIELDS:
        # Older onnxruntime has fewer fields; a log severity of -1 means the default and cannot be set.
        value: Any = getattr(source, name, None)
        if value is not None and value != getattr(made, name):
            setattr(made, name, value)
    for key in _ENTRIES:
        value = _entry(source, key)
        if value is not None:
            made.add_session_config_entry(key, value)
    return made


def session_options(source: ort.SessionOptions | None, folder: str) -> ort.SessionOptions:
    """Options for one of our sessions over a pack in `folder`; `source` is left as it is."""
    made = copy_options(source)
    made.add_session_config_entry(_FOLDER, folder)
    if _entry(made, _NBITS_ACCURACY) is None:
        # Otherwise DequantizeLinear + MatMul outside our sites silently gets activations quantized per block.
        made.add_session_config_entry(_NBITS_ACCURACY, "0")
    return made


def _entry(options: ort.SessionOptions, key: str) -> str | None:
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:
        return None
