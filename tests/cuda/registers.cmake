# cmake -D NVCC=... -D INCLUDES=... -D OUTPUT=... -P registers.cmake
# Compiles the kernels of the gated delta rule and of a decay a head for sm_90a; fails if registers are spilled or
# tensor cores' products serialised.
file(WRITE ${OUTPUT}.cu
    "#include <cpx/delta_rule_dstate.cuh>\n#include <cpx/delta_rule_grad.cuh>\n#include <cpx/delta_rule_scan.cuh>\n"
    "using namespace cpx::kernels;\n"
    "template <class T, bool Erases>\n"
    "void* const kernels[] = {(void*)delta_rule_prep<T, Erases>, (void*)delta_rule_state<T, Erases>,\n"
    "    (void*)delta_rule_main<T, Erases>, (void*)delta_rule_fold<T, Erases>,\n"
    "    (void*)delta_rule_grad<T, Erases>, (void*)delta_rule_walks<T, 1, Erases>};\n"
    "template <class T>\n"
    "void* const of_one[] = {(void*)delta_rule_walks<T, 2, true>, (void*)delta_rule_fold<T, false, true>,\n"
    "    (void*)delta_rule_walks<T, 1, true, true>, (void*)delta_rule_walks<T, 2, true, true>};\n"
    "template <class T>\n"
    "void* const* const of_type[] = {kernels<T, true>, kernels<T, false>, of_one<T>};\n"
    "void* const* const* const both_types[] = {of_type<__nv_bfloat16>, of_type<__half>};\n"
    "void* const joins[] = {(void*)delta_rule_join<true, 8>, (void*)delta_rule_join<true, 16>,\n"
    "    (void*)delta_rule_join<true, 32>, (void*)delta_rule_join<false, 8>};\n")
list(TRANSFORM INCLUDES PREPEND -I)
execute_process(
    COMMAND ${NVCC} -gencode arch=compute_90a,code=sm_90a -std=c++20 -O3 --expt-relaxed-constexpr -Xptxas -v
        ${INCLUDES} -cubin -o ${OUTPUT}.cubin ${OUTPUT}.cu
    OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "${said}")
endif()
foreach(erases 0 1)
    foreach(kernel join prep state main fold walks grad)
        foreach(type 13__nv_bfloat16 6__half)
            if(kernel STREQUAL "join")
                set(type "")
            endif()
            if(NOT said MATCHES "Function properties for [^\n]*delta_rule_${kernel}I${type}(Li[12]E)?Lb${erases}E")
                message(FATAL_ERROR "the compiler says nothing of delta_rule_${kernel}<${type} ${erases}>:\n${said}")
            endif()
        endforeach()
    endforeach()
endforeach()
if(said MATCHES "[(]C75[0-9][0-9][)][^\n]*|[^\n]*[1-9][0-9]* bytes (stack frame|spill)[^\n]*")
    message(FATAL_ERROR "${CMAKE_MATCH_0}\n${said}")
endif()
