rssm_add_test(backend_test ${CMAKE_CURRENT_LIST_DIR}/backend_test.cc LIBS rssm_engine)
rssm_add_test(attention_test ${CMAKE_CURRENT_LIST_DIR}/attention_test.cc LIBS rssm_engine)
