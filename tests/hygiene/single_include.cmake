# Makes the single header again, in MADE, and compares it with the committed one.
execute_process(COMMAND ${CMAKE_COMMAND} -D OUTPUT=${MADE} -P cmake/amalgamate.cmake COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${MADE} single_include/cpx/cpx.hpp RESULT_VARIABLE differs)
if(differs)
    message(FATAL_ERROR "single_include/cpx/cpx.hpp is not up to date; write it again with\n"
        "  cmake -D OUTPUT=single_include/cpx/cpx.hpp -P cmake/amalgamate.cmake")
endif()
