rssm_add_test(tokenizer_test ${CMAKE_CURRENT_LIST_DIR}/tokenizer_test.cc LIBS rssm_engine)
rssm_add_test(stream_decoder_test ${CMAKE_CURRENT_LIST_DIR}/stream_decoder_test.cc LIBS rssm_engine)
rssm_add_test(sampler_test ${CMAKE_CURRENT_LIST_DIR}/sampler_test.cc LIBS rssm_engine)
