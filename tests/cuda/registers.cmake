# cmake -D NVCC=... -D INCLUDES=... -D OUTPUT=... -P registers.cmake
# Compiles the gated delta rule's kernels for sm_90a; fails if registers are spilled or tensor cores' products serialised.
file(WRITE ${OUTPUT}.cu
    "#include <cpx/delta_rule_dstate.cuh>\n#include <cpx/delta_rule_grad.cuh>\n#include <cpx/delta_rule_scan.cuh>\n"
    "void* const walks[] = {(void*)cpx::kernels::delta_rule_walks<1>, (void*)cpx::kernels::delta_rule_walks<2>};\n")
list(TRANSFORM INCLUDES PREPEND -I)
execute_process(
    COMMAND ${NVCC} -gencode arch=compute_90a,code=sm_90a -std=c++20 -O3 --expt-relaxed-constexpr -Xptxas -v
        ${INCLUDES} -cubin -o ${OUTPUT}.cubin ${OUTPUT}.cu
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "${said}")
endif()
foreach(kernel prep state main fold join walks grad)
    if(NOT said MATCHES "Function properties for [^\n]*delta_rule_${kernel}")
        message(FATAL_ERROR "the compiler says nothing of delta_rule_${kernel}:\n${said}")
    endif()
endforeach()
if(said MATCHES "[(]C75[0-9][0-9][)][^\n]*|[^\n]*[1-9][0-9]* bytes (stack frame|spill)[^\n]*")
    message(FATAL_ERROR "${CMAKE_MATCH_0}\n${said}")
endif()
