"""The complete list of upstream code this platform adapts at run time.

Platform hooks and registries come first (``platform.py``); what stands here is
what none of them reaches. Each entry says which code, what goes wrong on a CPU
without it, and the extension point that would make it unnecessary. Life cycle:
:func:`arm` is called once per process at activation; each entry is installed the
moment its module is imported (``adapting.py``), so a process only pays for, and
only changes, what it uses.
"""

from __future__ import annotations

from sglang_cpu_reference import post_import
from sglang_cpu_reference.adapting import Adaptation, install
from sglang_cpu_reference.nixl_build import NIXL_BUILDS

_PACKAGE = "sglang_cpu_reference"

TABLE: tuple[Adaptation, ...] = (
    Adaptation(
        module="sglang.srt.utils.common",
        name="support_triton",
        kind="replace",
        hook=f"{_PACKAGE}.token_slots:no_triton",
        params=("backend",),
        why="releases before 0.5.22 infer Triton from the backend's name",
        seam="capabilities.supports_triton, since 0.5.22",
        unless="sglang.srt.platforms.interface:PlatformCapabilities",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.allocation",
        name="assign_req_to_token_pool_func",
        kind="replace",
        hook=f"{_PACKAGE}.token_slots:assign_req_to_token_pool",
        params=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        why="launches a Triton kernel although supports_triton is False",
        seam="the writer should follow capabilities.supports_triton",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.allocation",
        name="get_last_loc",
        kind="replace",
        hook=f"{_PACKAGE}.token_slots:last_slots",
        params=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        why="launches a Triton kernel unless the backend is named torch_native",
        seam="the choice should follow capabilities.supports_triton",
    ),
    Adaptation(
        module="sglang.kernels.ops.speculative.cache_locs",
        name="assign_extend_cache_locs_func",
        kind="replace",
        hook=f"{_PACKAGE}.token_slots:speculative_cache_locs",
        params=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "batch_size",
            "draft_token_num",
            "device",
        ),
        why="serves in-tree devices only before 0.5.21",
        seam="get_speculative_cache_locs_fn, since 0.5.21",
        unless=(
            "sglang.srt.platforms.interface:SRTPlatform.get_speculative_cache_locs_fn"
        ),
    ),
    Adaptation(
        module="torch",
        name="Tensor.record_stream",
        kind="around",
        hook=f"{_PACKAGE}.streams:record_stream",
        params=None,
        why="the DSPARK and HiCache workers call it on every device",
        seam="a stream-ownership helper on the platform",
    ),
    Adaptation(
        module="sglang.srt.entrypoints.engine",
        name="_set_envs_and_config",
        kind="after",
        hook=f"{_PACKAGE}.launching:before_processes_start",
        params=("server_args",),
        why="each process of an engine imports everything anew, and Gloo's threads of "
        "several ranks keep each other from the cores",
        seam="a platform hook before processes start, also for how; spawn is for CUDA",
    ),
    Adaptation(
        module="sglang.srt.managers.scheduler",
        name="Scheduler.on_idle",
        kind="after",
        hook=f"{_PACKAGE}.idle:rest_after_idle_pass",
        params=("self",),
        why="a scheduler that waits for a transfer polls without a pause",
        seam="--sleep-on-idle covers fully idle schedulers only",
    ),
    Adaptation(
        module="sglang.srt.managers.data_parallel_controller",
        name="DataParallelController.event_loop",
        kind="around",
        hook=f"{_PACKAGE}.idle:listen_patiently",
        params=("self",),
        why="the process that shares out requests between ranks of attention DP spins",
        seam="its loop could wait for its socket, as --sleep-on-idle lets schedulers",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.base",
        name="HICACHE_HOST_MEMORY_RESERVE_BYTES",
        kind="constant",
        hook=f"{_PACKAGE}.hicache:HOST_MEMORY_RESERVE_BYTES",
        params=None,
        why="keeps 10 GiB free beside a pool of a few MiB, or refuses to start",
        seam="a flag or a platform hook for the reserve",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.base",
        name="HostKVCache.__init__",
        kind="around",
        hook=f"{_PACKAGE}.hicache:unpin",
        params=None,
        why="host pools ask for pinned memory by default",
        seam="the default should follow is_pin_memory_available",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.mha",
        name="MHATokenToKVPoolHost.load_to_device_per_layer",
        kind="replace",
        hook=f"{_PACKAGE}.hicache:load_to_device_per_layer",
        params=(
            "self",
            "device_pool",
            "host_indices",
            "device_indices",
            "layer_id",
            "io_backend",
            "is_draft",
        ),
        optional=("is_draft",),
        why="the copy kernels exist for CUDA, ROCm, XPU and NPU only",
        seam="get_kv_pool_cls has no counterpart for host pools",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.mha",
        name="MHATokenToKVPoolHost.backup_from_device_all_layer",
        kind="replace",
        hook=f"{_PACKAGE}.hicache:backup_from_device_all_layer",
        params=(
            "self",
            "device_pool",
            "host_indices",
            "device_indices",
            "io_backend",
        ),
        why="the copy kernels exist for CUDA, ROCm, XPU and NPU only",
        seam="get_kv_pool_cls has no counterpart for host pools",
    ),
    Adaptation(
        module="sglang.srt.layers.dp_attention",
        name="memcpy_func",
        kind="replace",
        hook=f"{_PACKAGE}.attention_dp:copy_rows",
        params=("dst", "src", "dim", "offset", "sz", "offset_src"),
        why="attention DP gathers and scatters tokens with a Triton kernel",
        seam="the choice should follow capabilities.supports_triton",
        since="sglang.srt.layers.dp_attention:memcpy_func",
    ),
    Adaptation(
        module="sglang.srt.model_executor.forward_batch_info",
        name="_is_cpu",
        kind="constant",
        hook=f"{_PACKAGE}.attention_dp:IS_CPU",
        params=None,
        why="attention DP sends its token counts from page-locked memory",
        seam="the choice should follow is_pin_memory_available",
        since="sglang.srt.layers.dp_attention:memcpy_func",
    ),
    *(
        Adaptation(
            module="sglang.srt.distributed.parallel_state",
            name=f"GroupCoordinator.{name}",
            kind="replace",
            hook=f"{_PACKAGE}.attention_dp:{name}",
            params=("self", "output", "input"),
            why="its custom op is registered for PrivateUse1, the tensors are a CPU's",
            seam="custom ops of an out-of-tree platform should take its dispatch key",
        )
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
    ),
    Adaptation(
        module="sglang.kernels.ops.speculative.reject_sampling",
        name="chain_speculative_sampling_triton",
        kind="replace",
        hook=f"{_PACKAGE}.verify_sampling:chain_speculative_sampling",
        params=(
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrive_index",
            "retrive_next_token",
            "retrive_next_sibling",
            "uniform_samples",
            "uniform_samples_for_final_sampling",
            "target_probs",
            "draft_probs",
            "threshold_single",
            "threshold_acc",
            "deterministic",
            "block_verification",
        ),
        optional=("block_verification",),
        why="DSPARK's verify of a sampling request launches a Triton kernel",
        seam="AcceptSampling.torch should take a sampler from the platform",
    ),
    Adaptation(
        module="sglang.srt.sampling.sampling_batch_info",
        name="SamplingBatchInfo.from_schedule_batch",
        kind="after",
        hook=f"{_PACKAGE}.coins:seed_every_request",
        params=("batch", "vocab_size"),
        why="seeds of requests are dropped without deterministic inference",
        seam="deterministic inference accepts no backend of another platform",
    ),
    Adaptation(
        module="sglang.srt.layers.sampler",
        name="multinomial_with_seed",
        kind="replace",
        hook=f"{_PACKAGE}.sampling:draw_by_seed",
        params=("logprobs", "seed", "positions"),
        why="needs sgl_kernel's hash and a compiler on a CPU",
        seam="the sampler has no hook for a draw with seeds",
    ),
    Adaptation(
        module="sglang.srt.layers.sampler",
        name="top_k_top_p_min_p_sampling_from_probs_torch",
        kind="around",
        hook=f"{_PACKAGE}.sampling:draw_among_kept",
        params=(
            "probs",
            "top_ks",
            "top_ps",
            "min_ps",
            "need_min_p_sampling",
            "sampling_seed",
            "positions",
            "return_filtered_probs",
            "max_top_k",
        ),
        optional=("return_filtered_probs", "max_top_k"),
        why="a seed gives another token beside a request that has such a field, and "
        "min-p refuses seeds",
        seam="a draw with seeds in the vocabulary's order, after all three filters",
    ),
    Adaptation(
        module="sglang.srt.speculative.dspark_components.dspark_worker_v2",
        name="DSparkWorkerV2._forward_decode",
        kind="around",
        hook=f"{_PACKAGE}.coins:decode_with_coins",
        params=("self", "batch", "on_publish", "grammar_barrier", "coordination_plan"),
        optional=("grammar_barrier", "coordination_plan"),
        why="draft and verify draw from generators of the process, not of a request",
        seam="AcceptSampling and MarkovSampleStep know neither seeds nor positions",
    ),
    Adaptation(
        module="sglang.kernels.ops.speculative.dspark.markov_sample",
        name="MarkovSampleStep.execute",
        kind="around",
        hook=f"{_PACKAGE}.sampling:draft_step",
        params=("kwargs",),
        why="a row's noise depends on its place and on the engine's age",
        seam="a key and an offset per row",
    ),
    *(
        Adaptation(
            module=f"{build}._api",
            name="nixl_agent",
            kind="replace",
            hook=f"{_PACKAGE}.nixl_dram:HostMemoryAgent",
            params=None,
            why="KV buffers are declared VRAM; a CPU's pool is DRAM",
            seam="the pool's memory kind should come from the platform",
        )
        for build in NIXL_BUILDS
    ),
    *(
        Adaptation(
            module=f"{build}._bindings",
            name="nixlAgent",
            kind="replace",
            hook=f"{_PACKAGE}.nixl_pacing:PacedAgent",
            params=None,
            why="the progress thread spins a whole core per engine",
            seam="nixl_agent_config has no progress thread delay",
        )
        for build in NIXL_BUILDS
    ),
    Adaptation(
        module="sglang.srt.disaggregation.mooncake.conn",
        name="MooncakeKVSender.supports_host_tensor_indices",
        kind="constant",
        hook=f"{_PACKAGE}.streams:INDICES_ARE_COPIED_ASIDE",
        params=None,
        why="prefill pins memory and records a CUDA event for each chunk it sends",
        seam="the copy should follow is_pin_memory_available",
        since=(
            "sglang.srt.disaggregation.mooncake.conn:"
            "MooncakeKVSender.supports_host_tensor_indices"
        ),
    ),
    Adaptation(
        module="mooncake.engine",
        name="TransferEngine",
        kind="replace",
        hook=f"{_PACKAGE}.mooncake_bytes:CountingEngine",
        params=None,
        why="no test could tell whether KV moved, and how much",
        seam="a count of moved bytes that Mooncake gives its caller",
    ),
)


def arm() -> None:
    """Install every adaptation as soon as its module is imported."""
    for adaptation in TABLE:
        post_import.watch(adaptation.module, lambda entry=adaptation: install(entry))
