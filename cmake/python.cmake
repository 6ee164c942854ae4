# The extension module telegrad._core.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module) # prerequisites.cmake has seen Python.h
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

telegrad_glob(module_sources python codec)
# NOMINSIZE: keep CMake's -O3, where nanobind would choose -Os; a call's cost is what this project is about.
nanobind_add_module(_core NB_STATIC NOMINSIZE ${module_sources})
target_link_libraries(_core PRIVATE telegrad_core)
target_include_directories(_core SYSTEM PRIVATE ${NB_DIR}/include) # its headers are not ours to warn about
install(TARGETS _core LIBRARY DESTINATION telegrad)
