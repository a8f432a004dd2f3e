"""`python -m tvm_fusion calibrate`: measures a device and writes its profile.

What it writes
--------------
Micro-benchmarks own the numbers that stand for one resource of the device alone:

    CUDA  hbm_bytes_per_s, l2_bytes_per_s, l2_usable_share, hbm_access_bytes,
          bytes_in_flight_latency_s, smem_bytes_per_s, smem_conflict_factor, fma_per_s_f32,
          special_per_s, special_slots, conversion_per_s, int_per_s, int_div_per_s,
          spill_bytes_per_s, code_bytes_per_s, instruction_cache_bytes, launch_us,
          queued_launch_us, graph_launch_us, tensor_flop_per_s
    llvm  hbm_bytes_per_s, l2_bytes_per_s, smem_bytes_per_s, fma_per_s_f32, special_per_s,
          special_slots, int_per_s, int_div_per_s, conversion_per_s, launch_us,
          graph_launch_us, queued_launch_us, num_sms

The few of a CPU that decide its plans are measured at first use, too (`host`), for the targets
"llvm" and "cpu"; "llvm_cpu" is the profile that ships.

What it leaves alone
--------------------
The numbers of `kernels/row/cost.py` (memory_latency_s, l2_latency_s, block_start_s, barrier_s,
shuffle_s, sm_bytes_per_s, wavefronts_per_s, blocks_per_s, kernel_gap_us and the others of that
group) were fitted together to whole kernels. They are effective values: each holds a share of what
the others leave out, so that one replaced by its micro-benchmark would make the sum worse. What
micro-benchmarks say about the same resources is written as comments at the end of the file.

All other numbers (sizes, counts, limits) come from datasheets and stay.
"""
