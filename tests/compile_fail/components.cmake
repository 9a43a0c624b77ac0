# Checks that a header whose compiler or third party is missing says so first, and what to do.
#
# The preprocessor of COMPILER finds the headers below SOURCE_DIR and no others, not even those of the standard library.
# One with folders of its own, such as a wrapper, still finds some, which fail because they do not find others: only what
# it says of cpx's headers counts.
set(ENV{LC_ALL} C)
unset(ENV{CPATH})
unset(ENV{C_INCLUDE_PATH})
unset(ENV{CPLUS_INCLUDE_PATH})

function(says sentence)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS;EXCEPT;DEFINE")
    list(TRANSFORM arg_HEADERS PREPEND ${SOURCE_DIR}/)
    file(GLOB headers ${arg_HEADERS})
    list(TRANSFORM arg_EXCEPT PREPEND ${SOURCE_DIR}/)
    list(REMOVE_ITEM headers ${arg_EXCEPT})
    if(NOT headers)
        message(FATAL_ERROR "no such headers: ${arg_HEADERS}")
    endif()
    foreach(header IN LISTS headers)
        execute_process(OUTPUT_QUIET ERROR_VARIABLE text COMMAND ${COMPILER} -std=c++20 -M -MG -nostdinc -nostdinc++
            -I ${SOURCE_DIR}/include -I ${SOURCE_DIR}/kernels ${arg_DEFINE} -x c++ ${header})
        string(REGEX MATCH "/(include|kernels)/cpx/[^\n]* error: [^\n]*" first "${text}")
        if(NOT first MATCHES "${sentence}")
            message(SEND_ERROR "${header}: not \"${sentence}\" but \"${first}\"")
        endif()
    endforeach()
endfunction()

# Nothing but the sentence, and where it was included: what would follow is not compiled.
function(stops sentence standard text)
    set(source ${CMAKE_CURRENT_BINARY_DIR}/stops.cpp)
    file(WRITE ${source} "${text}\n")
    execute_process(OUTPUT_QUIET ERROR_VARIABLE text COMMAND ${COMPILER} -std=${standard} -fsyntax-only
        -I ${SOURCE_DIR}/include -I ${SOURCE_DIR}/single_include ${source})
    string(REGEX MATCHALL "\n" lines "${text}")
    list(LENGTH lines count)
    string(REGEX MATCH " error: [^\n]*" first "${text}")
    if(NOT first MATCHES "${sentence}" OR count GREATER 15)
        message(SEND_ERROR "${count} lines, not \"${sentence}\" alone:\n${text}")
    endif()
endfunction()
stops("compile with -std=c..20" c++17 "#include <cpx/cpx.hpp>")
stops("compile with -std=c..20" c++17 "#include \"${SOURCE_DIR}/single_include/cpx/cpx.hpp\"")
stops("name the file .cu and link cpx::cuda" c++20 "#include <cpx/cuda/exchange.hpp>")

set(nccl include/cpx/transport/nccl.hpp include/cpx/transport/nccl_w*.hpp)
set(of_engines include/cpx/cuda/attention_engine.hpp include/cpx/cuda/cudnn_attention.hpp) # no kernels in them
says("name the file .cu and link cpx::cuda" HEADERS include/cpx/cuda/*.hpp kernels/cpx/*.cuh ${nccl} EXCEPT ${of_engines})
says("needs CUDA's headers; link cpx::cuda" HEADERS include/cpx/cuda/attention_engine.hpp)
says("needs cuDNN 9 and the headers of its frontend; link cpx::cudnn" HEADERS include/cpx/cuda/cudnn_attention.hpp)
says("needs NCCL 2.28 or newer. link cpx::nccl" HEADERS ${nccl} DEFINE -D__CUDACC__)
execute_process(OUTPUT_QUIET ERROR_VARIABLE text COMMAND ${COMPILER} -E -nostdinc -nostdinc++ -include mpi.h -x c++
    /dev/null)
if(text MATCHES "error: '?mpi[.]h") # MPI's own wrapper finds it
    says("needs MPI. link cpx::mpi" HEADERS include/cpx/transport/mpi.hpp)
endif()
says("need Eigen 3.4 or newer. link cpx::ops" HEADERS include/cpx/ops.hpp include/cpx/ops/eigen.hpp)
says("needs nlohmann_json 3.11 or newer. link cpx::model" HEADERS include/cpx/model/json*.hpp
    include/cpx/model/safetensors.hpp include/cpx/model/qwen_*.hpp)
