target_sources(rssm_engine PRIVATE ${CMAKE_CURRENT_LIST_DIR}/sampler.cc)
