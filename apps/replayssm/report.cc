#include "report.h"

#include <fmt/core.h>

#include <cstdio>

namespace replayssm::app {

Json run_json(const Session& session, const Run& run, const std::string& text) {
  const TrafficPerToken traffic = traffic_per_token(run.generation);
  Json json;
  json["tokens"] = run.generation.tokens;
  json["text"] = text;
  json["prompt_tokens"] = run.generation.prompt_tokens;
  json["decode"] = run.plan.replay ? "replay" : "plain";
  json["requested"] = to_string(run.decode);
  json["reason"] = run.plan.reason;
  json["window"] = run.plan.window;
  json["state"] = to_string(run.state);
  json["isa"] = to_string(session.context.isa);
  json["threads"] = session.context.thread_count();
  json["seconds"] = {{"load", session.load_seconds},
                     {"prompt", run.generation.prompt_seconds},
                     {"decode", run.generation.decode_seconds}};
  json["tokens_per_second"] = tokens_per_second(run.generation);
  json["state_bytes_per_token"] = {{"read", traffic.read},
                                   {"written", traffic.written},
                                   {"checkpoint_written", traffic.checkpoint_written}};
  return json;
}

void print_json(const Json& json) {
  // Text may end inside a character where a stop cut it; JSON must stay valid.
  const std::string line = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string decode_text(const Run& run) {
  const std::string how = run.plan.replay ? fmt::format("replay {}", run.plan.window) : "plain";
  return run.decode == DecodeMode::kAuto ? "auto (" + how + ")" : how;
}

}  // namespace replayssm::app
