# Checks that every source file is formatted as .clang-format says.
if(NOT CLANG_FORMAT)
    message("cpx: skipped, clang-format-16 not found")
    return()
endif()
file(GLOB_RECURSE sources include/*.hpp kernels/*.cuh tests/*.[ch]pp examples/*.[ch]pp bench/*.[ch]pp harness/*.hpp
    python/src/*.[ch]pp tests/*.cu examples/*.cu bench/*.cu)
execute_process(COMMAND ${CLANG_FORMAT} --dry-run -Werror ${sources} RESULT_VARIABLE differs)
if(differs)
    message(FATAL_ERROR "some files are not formatted; format them with\n  clang-format-16 -i FILE...")
endif()
