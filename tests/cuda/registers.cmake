# cmake -D NVCC=... -D INCLUDES=... -D OUTPUT=... -P registers.cmake
# Compiles the kernels of the gated delta rule and of a decay a head for sm_90a; fails if registers are spilled or
# tensor cores' products serialised.
file(WRITE ${OUTPUT}.cu
    "#include <cpx/delta_rule_dstate.cuh>\n#include <cpx/delta_rule_grad.cuh>\n#include <cpx/delta_rule_scan.cuh>\n"
    "using namespace cpx::kernels;\n"
    "template <bool Erases>\n"
    "void* const kernels[] = {(void*)delta_rule_prep<Erases>, (void*)delta_rule_state<Erases>,\n"
    "    (void*)delta_rule_main<Erases>, (void*)delta_rule_fold<Erases>,\n"
    "    (void*)delta_rule_join<Erases, 8>,\n"
    "    (void*)delta_rule_grad<Erases>, (void*)delta_rule_walks<1, Erases>};\n"
    "void* const* const both[] = {kernels<true>, kernels<false>};\n"
    "void* const of_one[] = {(void*)delta_rule_walks<2, true>, (void*)delta_rule_fold<false, true>,\n"
    "    (void*)delta_rule_join<true, 16>, (void*)delta_rule_join<true, 32>,\n"
    "    (void*)delta_rule_walks<1, true, true>, (void*)delta_rule_walks<2, true, true>};\n")
list(TRANSFORM INCLUDES PREPEND -I)
execute_process(
    COMMAND ${NVCC} -gencode arch=compute_90a,code=sm_90a -std=c++20 -O3 --expt-relaxed-constexpr -Xptxas -v
        ${INCLUDES} -cubin -o ${OUTPUT}.cubin ${OUTPUT}.cu
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "${said}")
endif()
foreach(kernel prep state main fold join walks grad)
    foreach(erases 0 1)
        if(NOT said MATCHES "Function properties for [^\n]*delta_rule_${kernel}I(Li[12]E)?Lb${erases}E")
            message(FATAL_ERROR "the compiler says nothing of delta_rule_${kernel}<${erases}>:\n${said}")
        endif()
    endforeach()
endforeach()
if(said MATCHES "[(]C75[0-9][0-9][)][^\n]*|[^\n]*[1-9][0-9]* bytes (stack frame|spill)[^\n]*")
    message(FATAL_ERROR "${CMAKE_MATCH_0}\n${said}")
endif()
