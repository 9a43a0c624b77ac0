# cmake -D PROGRAM=<file> -D RANKS=<1 to 9> -D EXPECT=<line> -P expect_on_gpus.cmake
# The program's ranks, processes with torchrun's variables and a GPU each, must succeed, and rank 0 alone print the line.
# Where there are fewer GPUs, the test is skipped: a rank of its own asks for the last one, for others would wait for it.
cmake_minimum_required(VERSION 3.25)

# run(<ranks> <local rank>...): they run at once, each one's output the next one's input, so that the last one's is kept;
# where they meet no other run does.
function(run ranks)
    foreach(local IN LISTS ARGN)
        math(EXPR rank "${local} % ${ranks}")
        list(APPEND processes COMMAND ${CMAKE_COMMAND} -E env --unset=NCCL_COMM_ID WORLD_SIZE=${ranks} RANK=${rank}
            LOCAL_RANK=${local} MASTER_ADDR=127.0.0.1 MASTER_PORT=296${ranks}${RANKS}
            ${PROGRAM} --on gpus --ranks ${ranks} --json)
    endforeach()
    execute_process(${processes} RESULTS_VARIABLE codes OUTPUT_VARIABLE out ERROR_VARIABLE err)
    return(PROPAGATE codes out err)
endfunction()

math(EXPR last "${RANKS} - 1")
run(1 ${last})
if(err MATCHES "GPUs: expected at least 1|LOCAL_RANK: expected")
    message("cpx: skipped, ${err}")
    return()
endif()
if(last GREATER 0)
    foreach(before RANGE ${last})
        math(EXPR local "${last} - ${before}")
        list(APPEND locals ${local})
    endforeach()
    run(${RANKS} ${locals})
endif()
if(NOT codes MATCHES "^0(;0)*$" OR NOT out STREQUAL "${EXPECT}\n")
    message(FATAL_ERROR "expected exit codes 0 and ${EXPECT}, got ${codes}\n${out}${err}")
endif()
