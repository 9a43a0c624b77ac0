# cmake -D PROGRAM=<file> -D ARGS=<command line> -P expect_figures.cmake
# The program, asked for JSON, must agree with its reference, gradients too if it has any, and with one rank to the bit
# where it says so, and send no row in vain. Where it finds fewer GPUs than it wants, the test is skipped.
#
# In bfloat16 it may be off by twice as much as transformers itself is: 5.17.0 with torch 2.11.0, in bfloat16 on an
# H200, by bench/peers/qwen.py (largest and mean difference of log-probabilities, largest and mean relative error of
# gradients):
#     tiny_qwen3_5      1.585   0.1216   1.127   0.5804
#     tiny_qwen3_5_moe  2.551   0.1902   1.817   0.7868
#     tiny_qwen3_5_vl   1.258   0.07069  1.033   0.5107
#     tiny_qwen3_vl     0.09576 0.02439  0.05925 0.03449
# A gradient of zeros would be off by 1: where twice transformers' mean says less than that, 5 quarters of what was seen
# do (0.596, 0.583 and 0.298).
# The loss is a mean of log-probabilities, so it cannot be off by more than these on average.
set(twice_tiny_qwen3_5 3.170 0.2431 2.254 0.745)
set(twice_tiny_qwen3_5_moe 5.102 0.3804 3.634 0.729)
set(twice_tiny_qwen3_5_vl 2.516 0.1413 2.065 0.373)
set(twice_tiny_qwen3_vl 0.1915 0.04878 0.1185 0.06897)
set(max_abs_delta 1e-3) # in float32
set(mean_abs_delta 5e-5)
set(max_grad_error 5e-3)
set(mean_grad_error 5e-3)
set(loss_delta 5e-5)
if(ARGS MATCHES "--dtype bfloat16")
    string(REGEX REPLACE ".*--model data/([a-z0-9_]+).*" "\\1" model "${ARGS}")
    list(LENGTH twice_${model} figures)
    if(NOT figures EQUAL 4)
        message(FATAL_ERROR "no limits in bfloat16 of ${model}")
    endif()
    list(POP_FRONT twice_${model} max_abs_delta mean_abs_delta max_grad_error mean_grad_error)
    set(loss_delta ${mean_abs_delta})
endif()
set(limits max_abs_delta=${max_abs_delta} max_abs_delta_to_one_rank=${max_abs_delta} mean_abs_delta=${mean_abs_delta}
    loss_delta=${loss_delta})
cmake_minimum_required(VERSION 3.25)
separate_arguments(arguments UNIX_COMMAND "${ARGS}")
execute_process(COMMAND ${PROGRAM} ${arguments} --json RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(code EQUAL 1 AND err MATCHES "--device: GPUs: expected at least 1|--ranks: number of ranks: expected at most the GPUs")
    message("cpx: skipped, ${err}")
    return()
elseif(NOT code EQUAL 0 OR NOT err STREQUAL "")
    message(FATAL_ERROR "exit code ${code}\n${out}${err}")
endif()
message("${out}")

string(JSON count LENGTH "${out}" strategies)
if(count LESS 1)
    message(FATAL_ERROR "no strategy")
endif()
if("--backward" IN_LIST arguments)
    set(gradient_figures max_grad_error mean_grad_error grads_equal_one_rank)
    list(APPEND limits max_grad_error=${max_grad_error} mean_grad_error=${mean_grad_error})
endif()
math(EXPR last "${count} - 1")
foreach(i RANGE ${last})
    foreach(figure IN ITEMS device max_abs_delta mean_abs_delta max_abs_delta_to_one_rank loss_delta
            exact rows_sent rows_lower_bound bytes_sent bytes_lower_bound ${gradient_figures})
        string(JSON ${figure} GET "${out}" strategies ${i} ${figure})
    endforeach()
    if(NOT device STREQUAL "cuda")
        message(FATAL_ERROR "it ran on ${device}")
    endif()
    string(JSON holds GET "${out}" strategies ${i} contract holds)
    if(NOT holds STREQUAL exact)
        message(FATAL_ERROR "the contract says ${holds}, and exact is ${exact}")
    endif()
    if(exact AND (NOT max_abs_delta_to_one_rank EQUAL 0 OR (gradient_figures AND NOT grads_equal_one_rank)))
        message(FATAL_ERROR "exact, but not bitwise one rank's")
    endif()
    foreach(limit IN LISTS limits)
        string(REPLACE "=" ";" limit "${limit}")
        list(GET limit 0 figure)
        list(GET limit 1 most)
        if(NOT ${figure} LESS_EQUAL most)
            message(FATAL_ERROR "${figure}: expected at most ${most}, got ${${figure}}")
        endif()
    endforeach()
    if(NOT mean_abs_delta GREATER 0) # the reference is another program's
        message(FATAL_ERROR "mean_abs_delta: expected more than 0, got ${mean_abs_delta}")
    endif()
    if(NOT rows_sent EQUAL rows_lower_bound OR NOT bytes_sent EQUAL bytes_lower_bound)
        message(FATAL_ERROR "sent ${rows_sent} rows, ${bytes_sent} bytes: expected ${rows_lower_bound}, ${bytes_lower_bound}")
    endif()
endforeach()
