# cmake -D PROGRAM=<file> -D RANKS=<number> -D PORT=<number> -D EXPECT=<line> -P expect_on_gpus.cmake
# The program's ranks, processes with torchrun's variables and a GPU each, must succeed, and rank 0 alone print the line.
# Where there are fewer GPUs, the test is skipped.
cmake_minimum_required(VERSION 3.25)

set(variables --unset=NCCL_COMM_ID WORLD_SIZE=${RANKS} MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT})
math(EXPR last "${RANKS} - 1")
foreach(before RANGE ${last}) # they run at once, each one's output the next one's input: rank 0's is kept
    math(EXPR rank "${last} - ${before}")
    list(APPEND ranks COMMAND ${CMAKE_COMMAND} -E env ${variables} RANK=${rank} LOCAL_RANK=${rank}
        ${PROGRAM} --on gpus --ranks ${RANKS} --json)
endforeach()
execute_process(${ranks} RESULTS_VARIABLE codes OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(err MATCHES "GPUs: expected at least 1|LOCAL_RANK: expected")
    message("cpx: skipped, ${err}")
elseif(NOT codes MATCHES "^0(;0)*$" OR NOT out STREQUAL "${EXPECT}\n")
    message(FATAL_ERROR "expected exit codes 0 and ${EXPECT}, got ${codes}\n${out}${err}")
endif()
