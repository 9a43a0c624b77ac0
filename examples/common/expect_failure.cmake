# cmake -D PROGRAM=<file> -D ARGS=<command line> -D LINES=<text> -D EXPECT=<regex> -P expect_failure.cmake
# The program, with these lines on standard input if there are any, must exit with code 1, say why in one line on stderr,
# print nothing else.
separate_arguments(arguments UNIX_COMMAND "${ARGS}")
if(LINES)
    set(input COMMAND printf "%s\\n" "${LINES}")
endif()
execute_process(${input} COMMAND ${PROGRAM} ${arguments} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT code EQUAL 1)
    message(FATAL_ERROR "expected exit code 1, got ${code}\n${out}${err}")
elseif(NOT out STREQUAL "")
    message(FATAL_ERROR "expected nothing on stdout, got\n${out}")
elseif(NOT err MATCHES "^[^\n]+\n$" OR NOT err MATCHES "${EXPECT}")
    message(FATAL_ERROR "expected one line that matches ${EXPECT}, got\n${err}")
endif()
