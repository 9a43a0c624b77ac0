# cpx_kernels_for_cpu(<folder>): copies of kernels/ into <folder> that C++ compilers take: without the header that refuses
# these; memory that a launch gives is that of gpu.hpp, and so are the two instructions of PTX that are not behind a function
# of tensor_cores.cuh or system_scope.cuh.
function(cpx_kernels_for_cpu folder)
    file(GLOB kernels CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/kernels ${PROJECT_SOURCE_DIR}/kernels/cpx/*.cuh)
    list(REMOVE_ITEM kernels cpx/tensor_cores.cuh cpx/system_scope.cuh)
    foreach(kernel IN LISTS kernels)
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/${kernel})
        file(READ ${PROJECT_SOURCE_DIR}/kernels/${kernel} text)
        string(REPLACE "#include <cpx/cuda/nvcc.hpp>\n" "" text "${text}")
        string(REGEX REPLACE "extern __shared__ __align__\\([0-9]+\\) ([a-z_]+) ([a-z_]+)\\[\\];"
            "\\1* const \\2 = reinterpret_cast<\\1*>(gpu::now().shared());" text "${text}")
        string(REGEX REPLACE "asm\\(\"(ex2|rcp)[^\n]*\"=f\"\\(([a-z]+)\\) : \"f\"\\(([^\n]+)\\)\\);"
            "\\2 = \\1_flushed(\\3);" text "${text}")
        file(CONFIGURE OUTPUT ${folder}/${kernel} CONTENT "${text}" @ONLY)
    endforeach()
endfunction()
