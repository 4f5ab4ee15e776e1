find_package(nlohmann_json REQUIRED)
rssm_add_test(parity_test ${CMAKE_CURRENT_LIST_DIR}/parity_test.cc LIBS rssm_engine)
rssm_add_test(engine_test
  ${CMAKE_CURRENT_LIST_DIR}/engine_failure_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine_test.cc
  LIBS rssm_engine nlohmann_json::nlohmann_json)
rssm_add_test(model_config_test
  ${CMAKE_CURRENT_LIST_DIR}/model_config_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/model_weights_test.cc
  LIBS rssm_engine nlohmann_json::nlohmann_json)
rssm_add_test(speculation_test
  ${CMAKE_CURRENT_LIST_DIR}/decoder_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/draft_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/saved_session_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/snapshot_test.cc
  LIBS rssm_engine nlohmann_json::nlohmann_json)
rssm_add_test(qwen3_5_test
  ${CMAKE_CURRENT_LIST_DIR}/qwen3_5_files_test.cc
  ${CMAKE_CURRENT_LIST_DIR}/qwen3_5_test.cc
  LIBS rssm_engine nlohmann_json::nlohmann_json)
