# rssm_add_isa_variants(TARGET STEM): adds STEM_generic.cc, and on x86-64 STEM_avx2.cc and
# STEM_avx512.cc, each compiled for its own instruction set. The rest of the library stays baseline.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(RSSM_X86 ON)
endif()

set(RSSM_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(RSSM_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c
    -mprefer-vector-width=512)

function(rssm_add_isa_variants target stem)
  # The target is usually defined in a parent directory, which sees neither this directory's relative
  # paths nor its source properties: hence absolute paths and TARGET_DIRECTORY.
  get_filename_component(stem ${stem} ABSOLUTE)
  target_sources(${target} PRIVATE ${stem}_generic.cc)
  if(RSSM_X86)
    target_sources(${target} PRIVATE ${stem}_avx2.cc ${stem}_avx512.cc)
    set_source_files_properties(${stem}_avx2.cc TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_OPTIONS "${RSSM_AVX2_FLAGS}")
    set_source_files_properties(${stem}_avx512.cc TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_OPTIONS "${RSSM_AVX512_FLAGS}")
  endif()
endfunction()
