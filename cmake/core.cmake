# telegrad_core: the part of the core that knows no Python.
telegrad_glob(core_sources base memory core transports)
if(core_sources)
  add_library(telegrad_core STATIC ${core_sources})
  target_link_libraries(telegrad_core PUBLIC telegrad_options)
else()
  add_library(telegrad_core INTERFACE)
  target_link_libraries(telegrad_core INTERFACE telegrad_options)
endif()
