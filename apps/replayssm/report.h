// Runs as JSON and as text.
#pragma once

#include <nlohmann/json.hpp>

#include "session.h"

namespace replayssm::app {

using Json = nlohmann::ordered_json;

/// The fields every run reports, in `generate` and in `compare`.
Json run_json(const Session& session, const Run& run, const std::string& text);

/// Prints a JSON object on a line of its own to stdout.
void print_json(const Json& json);

/// "12.3 MiB".
std::string bytes_text(double bytes);

/// "replay" or "plain" or "snapshot": what ran.
const char* decode_name(const Run& run);

/// Of the drafted tokens, the part that was accepted.
double acceptance(const Run& run);

/// "replay 16", "plain", "auto (plain)", "replay 16 + ngram 4".
std::string decode_text(const Run& run);

}  // namespace replayssm::app
