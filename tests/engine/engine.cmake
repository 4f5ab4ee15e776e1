rssm_add_test(parity_test ${CMAKE_CURRENT_LIST_DIR}/parity_test.cc LIBS rssm_engine)
