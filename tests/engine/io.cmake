rssm_add_test(safetensors_test ${CMAKE_CURRENT_LIST_DIR}/safetensors_test.cc LIBS rssm_engine)
