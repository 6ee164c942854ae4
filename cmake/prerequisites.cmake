# What the machine must have: a C++20 compiler, and the headers of Python. `pip install` shows the last lines that CMake
# prints, so each error says what is missing and how to get it. tools/check_compiler.sh does the same for `make`.
function(telegrad_missing what remedy)
  message(FATAL_ERROR " telegrad: needs ${what}.\n ${remedy}.\n") # a leading space keeps CMake from wrapping the line
endfunction()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  telegrad_missing("a C++20 compiler to build its core from source, but found none"
                   "On Debian: apt install g++. Or install a wheel, which needs no compiler")
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  telegrad_missing("a C++20 compiler; '${CMAKE_CXX_COMPILER}' is g++ ${CMAKE_CXX_COMPILER_VERSION}"
                   "g++ 11 or later is enough; set CXX to name another compiler")
endif()

if(TELEGRAD_BUILD_PYTHON)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    telegrad_missing("Python 3.11 or later" "Set -DPython_EXECUTABLE=/path/to/python3.11")
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('include'))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE telegrad_python_include COMMAND_ERROR_IS_FATAL ANY)
  if(NOT EXISTS "${telegrad_python_include}/Python.h")
    telegrad_missing("Python.h, which is not in ${telegrad_python_include}"
                     "On Debian: apt install python3-dev. Or install a wheel, which needs no headers")
  endif()
endif()
