# Sets cpx_wheels, the folder of the wheels that python3 knows.
if(NOT DEFINED cpx_wheels)
    find_program(CPX_PYTHON3 python3)
    mark_as_advanced(CPX_PYTHON3)
    if(CPX_PYTHON3)
        execute_process(COMMAND ${CPX_PYTHON3} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
            OUTPUT_VARIABLE cpx_wheels OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
endif()
