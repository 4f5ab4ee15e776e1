# Compile options shared by every target of this project; never exported to users of the library.
add_library(rssm_options INTERFACE)
target_compile_options(rssm_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers>
  # A multiply and an add are fused only where a kernel says so; otherwise "the same operations in
  # the same order" would depend on the compiler's mood.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
target_compile_options(rssm_options INTERFACE
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes>)
if(RSSM_WERROR)
  target_compile_options(rssm_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(RSSM_SANITIZE)
  add_compile_options(-fsanitize=${RSSM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${RSSM_SANITIZE})
endif()

find_program(RSSM_CCACHE ccache)
if(RSSM_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${RSSM_CCACHE})
endif()
