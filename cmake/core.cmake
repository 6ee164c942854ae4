# telegrad_core: the part of the core that knows no Python.
telegrad_glob(core_sources base memory core transports)
telegrad_filter_openssl(core_sources)
add_library(telegrad_core STATIC ${core_sources})
target_link_libraries(telegrad_core PUBLIC telegrad_options)
if(telegrad_openssl)
  target_link_libraries(telegrad_core PUBLIC OpenSSL::SSL OpenSSL::Crypto)
endif()
