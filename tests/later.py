"""Tests that are more of what another one already shows, at many seconds each: `make soak` runs them."""

LATER = (
    "training/test_average.py::test_the_average_is_that_of_its_definition_whatever_trains[jax fp16",
    "training/test_average.py::test_the_average_is_that_of_its_definition_whatever_trains[jax 8-bit",
    "training/test_average.py::test_the_table_and_both_tracers_see_an_fp32_copy_of_the_trained_weights[lora]",
    "training/test_commands.py::test_detached_run_survives_its_shell_and_stops_and_resumes[torch]",
    "training/test_commands.py::test_training_in_the_foreground_ends_in_a_summary[jax]",
    "training/test_compressed_state.py::test_both_backends_store_the_same_moments[muon]",
    "training/test_isolated_documents.py::test_gradients_are_those_of_documents_in_rows_of_their_own[llama-jax]",
    "training/test_isolated_documents.py::test_gradients_are_those_of_documents_in_rows_of_their_own[llama-scaled-jax]",
    "training/test_isolated_documents.py::test_the_jax_formula_is_near_what_xla_plans_and_no_mask_of_all_rows_is_held[gpt2",
    "training/test_isolated_documents.py::test_the_jax_formula_is_near_what_xla_plans_and_no_mask_of_all_rows_is_held[gemma3",
    "training/test_isolated_documents.py::test_training_with_other_optimizations_is_that_of_separate_rows[{}-jax]",
    "training/test_isolated_documents.py::test_training_with_other_optimizations_is_that_of_separate_rows[{'gradient_checkpointing': 'full', 'fused_loss': True}-jax]",
    "training/test_jax_trace.py::test_what_is_planned_is_what_the_engine_compiles[accumulating]",
    "training/test_lora.py::test_mixed_precision_trains_adapters_of_every_family[gpt2]",
    "training/test_memory_limit.py::test_smaller_micro_batches_bring_a_run_within_what_is_left[jax]",
    "training/test_optimizer_offload.py::test_jax_takes_the_same_steps_through_pinned_memory[{}]",
    "training/test_out_of_memory_ladder.py::test_a_step_too_large_is_taken_in_smaller_pieces_and_learns_the_same[jax]",
    "training/test_preflight.py::test_a_run_is_to_the_bit_what_it_is_without_a_preflight[jax-bf16-sr-muon]",
    "training/test_quantized_base.py::test_both_backends_take_the_same_twenty_steps[nf4-llama]",
    "pty/test_out_of_memory_story.py::test_one_key_relaunches_a_run_that_died_of_memory_and_it_finishes[torch]",
    "tui/test_tui_hostile.py::test_no_size_is_an_error[0]",
)  # fmt: skip
"""How ids begin, without the folder `tests`."""
