# Checks that one mistake does not compile, and that the message is the one promised.
#
# Line 1 of SOURCE is `// expect: REGEX`, a regular expression of CMake that the messages of g++ and of clang++ match.
# The mistake stands in the #else of an #ifdef CPX_GOOD, so that a file that fails for another reason is noticed.
file(STRINGS ${SOURCE} line LIMIT_COUNT 1)
if(NOT line MATCHES "^// expect: (.+)$")
    message(FATAL_ERROR "${SOURCE}: line 1 is not `// expect: REGEX`")
endif()
set(expect "${CMAKE_MATCH_1}")

list(REMOVE_ITEM INCLUDES /usr/include)
list(TRANSFORM INCLUDES PREPEND -isystem)
set(ENV{LC_ALL} C)
set(compile ${COMPILER} -std=c++20 -fsyntax-only ${INCLUDES} ${SOURCE})

execute_process(COMMAND ${compile} -DCPX_GOOD RESULT_VARIABLE good OUTPUT_VARIABLE text ERROR_VARIABLE text)
if(NOT good EQUAL 0)
    message("${text}")
    message(FATAL_ERROR "${SOURCE} does not compile with -DCPX_GOOD")
endif()

execute_process(COMMAND ${compile} RESULT_VARIABLE bad OUTPUT_VARIABLE text ERROR_VARIABLE text)
if(bad EQUAL 0)
    message(FATAL_ERROR "${SOURCE} compiles, and should not")
elseif(NOT text MATCHES "${expect}")
    message("${text}")
    message(FATAL_ERROR "${SOURCE} fails with another message than \"${expect}\"")
endif()
