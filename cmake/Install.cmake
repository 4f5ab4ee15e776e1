include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS replayssm replayssm_c EXPORT replayssm-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(RSSM_CUDA)
  install(TARGETS replayssm_cuda EXPORT replayssm-targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/replayssm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT replayssm-targets NAMESPACE replayssm::
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/replayssm)
configure_package_config_file(cmake/replayssm-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/replayssm-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/replayssm)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/replayssm-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/replayssm-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/replayssm-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/replayssm)
if(RSSM_ENGINE)
  install(TARGETS replayssm_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
