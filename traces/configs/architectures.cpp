#include "traces/configs/architectures.h"

#include <algorithm>
#include <map>

namespace lockstep {
namespace {

template <DecoderTraits traits>
void decoder(ConfigReading& reading) {
  decoder_layers(reading, traits);
}

struct Family {
  Architecture architecture;
  std::string_view names;  // separated by spaces
};

constexpr DecoderTraits kTyped{}, kTypedDerived{.reads_head_dim = false},
    kTypedAlone{.keeps_model_window = false}, kOneMore{.window_extra = 1},
    kPlain{.reads_types = false}, kPlainDerived{.reads_types = false, .reads_head_dim = false},
    kQwen2{.reads_types = false, .reads_head_dim = false, .refuses_mixes = true};

constexpr Family kFamilies[] = {
    // Each layer's window by layer_types; heads of head_dim elements.
    {{decoder<kTyped>},
     "LlamaForCausalLM LLaMAForCausalLM MistralForCausalLM Ministral3ForCausalLM AfmoeForCausalLM "
     "ApertusForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM ExaoneMoEForCausalLM "
     "Gemma2ForCausalLM Gemma3ForCausalLM GraniteForCausalLM GraniteSWAForCausalLM "
     "InternLM3ForCausalLM IQuestCoderForCausalLM Rnj1ForCausalLM TeleChat3ForCausalLM "
     "MuseGlimmerForCausalLM Phi3ForCausalLM SolarForCausalLM CohereCompassForCausalLM "
     "BeamForCausalLM AriaTextModel Granite4VisionLLMForCausalLM"},
    // The transformers backend.
    {{decoder<kTyped>},
     "ArceeForCausalLM CwmForCausalLM FlexOlmoForCausalLM GlmForCausalLM GPTNeoXForCausalLM "
     "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM Jais2ForCausalLM Kolibri1ForCausalLM "
     "MellumForCausalLM NanbeigeForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM "
     "PhiForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM Starcoder2ForCausalLM "
     "VaultGemmaForCausalLM TransformersForCausalLM TransformersMoEForCausalLM "
     "Emu3ForConditionalGeneration HunYuanVLForConditionalGeneration "
     "VibeVoiceAsrForConditionalGeneration"},
    {{decoder<kTypedAlone>}, "LagunaForCausalLM"},
    {{decoder<kTypedDerived>},
     "GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM"},
    {{decoder<kOneMore>}, "CohereForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM"},
    // One window for the whole model, or none.
    {{decoder<kPlain>},
     "BailingMoeForCausalLM BailingMoeV2ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM "
     "ExaoneForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM HYV3ForCausalLM "
     "HyperCLOVAXForCausalLM K2HorizonForCausalLM MixtralForCausalLM MiMoForCausalLM "
     "MiniMaxM2ForCausalLM NemotronForCausalLM OlmoeForCausalLM Param2MoEForCausalLM "
     "PhiMoEForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SarvamMoEForCausalLM "
     "Ernie4_5_VLMoeForCausalLM Cosmos3EdgeForCausalLM Molmo2TextModel"},
    {{decoder<kPlainDerived>},
     "BloomForCausalLM DeepseekForCausalLM GPT2LMHeadModel GPTJForCausalLM InternLM2ForCausalLM "
     "MiniCPMForCausalLM OPTForCausalLM OrionForCausalLM Qwen2MoeForCausalLM "
     "StableLmForCausalLM TeleChat2ForCausalLM TeleFLMForCausalLM MolmoForCausalLM"},
    {{decoder<kQwen2>}, "Qwen2ForCausalLM"},
    {{chunked_layers}, "Llama4ForCausalLM"},
    {{alternating_layers}, "GptOssForCausalLM"},
    {{falcon_layers}, "FalconForCausalLM GPTBigCodeForCausalLM"},
    {{chatglm_layers}, "ChatGLMModel ChatGLMForConditionalGeneration GLM4VForCausalLM"},
    {{grouped_layers}, "Step1ForCausalLM Step3TextForCausalLM Step3p5ForCausalLM"},
    {{attn_config_layers}, "DbrxForCausalLM"},
    {{block_config_layers}, "DeciLMForCausalLM"},
    {{gemma_shared_layers}, "Gemma3nForCausalLM Gemma4ForCausalLM"},
    {{mimo_layers}, "MiMoV2FlashForCausalLM MiMoV2ForCausalLM"},
    {{listed_window_layers}, "Plamo3ForCausalLM PanguEmbeddedForCausalLM"},
    {{looped_layers}, "HrmTextForCausalLM"},
    {{encoder_decoder_layers}, "WhisperForConditionalGeneration"},
    {{latent_layers},
     "DeepseekV2ForCausalLM DeepseekV3ForCausalLM AXK1ForCausalLM Glm4MoeLiteForCausalLM "
     "LongcatFlashForCausalLM PanguUltraMoEForCausalLM MistralLarge3ForCausalLM"},
    {{expanded_latent_layers}, "MiniCPM3ForCausalLM"},
    {{indexed_layers}, "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM"},
    {{sparse_block_layers}, "MiniMaxM3SparseForCausalLM"},
    {{compressed_layers}, "DeepseekV4ForCausalLM"},
    {{gated_delta_layers},
     "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM OlmoHybridForCausalLM "
     "Qwen4ExpForCausalLM"},
    {{kimi_layers}, "KimiLinearForCausalLM"},
    {{bailing_layers}, "BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM"},
    {{short_conv_layers}, "Lfm2ForCausalLM Lfm2MoeForCausalLM"},
    {{mamba_layers}, "MambaForCausalLM FalconMambaForCausalLM"},
    {{mamba2_layers}, "Mamba2ForCausalLM"},
    {{jamba_layers}, "JambaForCausalLM JambaForSequenceClassification"},
    {{zamba_layers}, "Zamba2ForCausalLM"},
    {{falcon_h1_layers}, "FalconH1ForCausalLM"},
    {{granite_hybrid_layers}, "GraniteMoeHybridForCausalLM"},
    {{nemotron_h_layers}, "NemotronHForCausalLM NemotronHPuzzleForCausalLM"},
    {{unread_layers},
     "AliceAIForCausalLM CohereAsrForConditionalGeneration DeepseekV41ForCausalLM "
     "DeepseekV4ForConditionalGeneration DomynEdgeForCausalLM DoryForCausalLM Dots3NoteForCausalLM "
     "FireRedASR2ForConditionalGeneration FlintForCausalLM FunASRForConditionalGeneration "
     "Glm5NextForCausalLM Glm5NextForConditionalGeneration HYV4ForCausalLM HfMoondream "
     "InklingForCausalLM InklingForConditionalGeneration InternS2MobiusForConditionalGeneration "
     "IQuestLoopCoderForCausalLM LongcatFlashNgramForCausalLM Moondream3ForCausalLM "
     "MuseSparkForConditionalGeneration NemotronParseForConditionalGeneration "
     "PanguProMoEV2ForCausalLM RadioMBartPrefixForCausalLM SarvamMLAForCausalLM Step5ForCausalLM "
     "Step5ForConditionalGeneration UnlimitedOCRForCausalLM JinaEmbeddingsV5Model "
     "D3ForSequenceClassification ClefOmniForJointSchema JinaVLForRanking "
     "Qwen3VLNemotronEmbedModel Qwen3ASRForcedAlignerForTokenClassification ColPaliForRetrieval "
     "Terratorch"},
    // Pooling: encoders keep nothing, decoders keep what they keep when they generate.
    {{encoder_layers, {}, true},
     "BertModel BertForMaskedLM BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel GteModel "
     "GteNewModel LlamaBidirectionalModel Lfm2BidirectionalModel ModernBertModel NomicBertModel "
     "RobertaForMaskedLM RobertaModel XLMRobertaModel SiglipModel EmbeddingGemma2Model "
     "VoyageQwen3BidirectionalEmbedModel HF_ColBERT ColBERTModernBertModel ColBERTJinaRobertaModel "
     "ColBERTLfm2Model ColModernVBertForRetrieval ModernVBertModel ColUltraVBertForRetrieval "
     "BertForTokenClassification BertForSequenceClassification ModernBertForTokenClassification "
     "ModernBertForSequenceClassification RobertaForTokenClassification "
     "GteNewForSequenceClassification "
     "RobertaForSequenceClassification XLMRobertaForTokenClassification "
     "XLMRobertaForSequenceClassification OpenAIPrivacyFilterForTokenClassification "
     "LlamaBidirectionalForSequenceClassification LlamaNemotronVLModel "
     "LlamaNemotronVLForSequenceClassification"},
    {{decoder<kTyped>, {}, true}, "LlamaModel MistralModel Gemma2Model Gemma3TextModel CLIPModel"},
    {{decoder<kPlain>, {}, true}, "JinaForRanking"},
    {{decoder<kPlainDerived>, {}, true},
     "Qwen2Model Qwen2ForRewardModel Qwen2ForProcessRewardModel InternLM2ForRewardModel "
     "GPT2ForSequenceClassification"},
    // Multimodal: the text part has an architecture of its own.
    {{nullptr},
     "AriaForConditionalGeneration BeeForConditionalGeneration Blip2ForConditionalGeneration "
     "Cohere2VisionForConditionalGeneration DeepseekVLV2ForCausalLM DeepseekOCRForCausalLM "
     "DeepseekOCR2ForCausalLM Eagle2_5_VLForConditionalGeneration "
     "GraniteSpeechForConditionalGeneration "
     "GraniteSpeechPlusForConditionalGeneration H2OVLChatModel InternVLChatModel "
     "InternS1ForConditionalGeneration InternVLForConditionalGeneration "
     "Idefics3ForConditionalGeneration LightOnOCRForConditionalGeneration "
     "Llama_Nemotron_Nano_VL LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
     "LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration "
     "Mistral3ForConditionalGeneration NVLM_D OpenVLAForActionPrediction Ovis Ovis2_5 "
     "Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM PaliGemmaForConditionalGeneration "
     "PixtralForConditionalGeneration QianfanOCRForConditionalGeneration RForConditionalGeneration "
     "SkyworkR1VChatModel SmolVLMForConditionalGeneration UltravoxModel "
     "VoxtralForConditionalGeneration VoxtralRealtimeGeneration HCXVisionV2ForCausalLM"},
    {{nullptr, "LlamaForCausalLM"},
     "KananaVForConditionalGeneration GlmAsrForConditionalGeneration Phi3VForCausalLM "
     "Phi4MMForCausalLM"},
    {{nullptr, "Phi3ForCausalLM"}, "Phi4ForCausalLMV"},
    {{nullptr, "Qwen2ForCausalLM"},
     "AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration DotsOCRForCausalLM "
     "MoonshotKimiaForCausalLM MiDashengLMModel OpenCUAForConditionalGeneration "
     "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration "
     "Qwen2AudioForConditionalGeneration Qwen2_5OmniModel Qwen2_5OmniForConditionalGeneration"},
    {{nullptr, "Qwen3ForCausalLM"},
     "Alpamayo2Super Cosmos3ForConditionalGeneration FunAudioChatForConditionalGeneration "
     "IsaacForConditionalGeneration KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration "
     "MossTranscribeDiarizeForConditionalGeneration LlavaOnevision2ForConditionalGeneration "
     "MossAudioModel Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration "
     "Qwen3VLForConditionalGeneration ColQwen3 OpsColQwen3Model"},
    {{nullptr, "Qwen3MoeForCausalLM"},
     "Qwen3OmniMoeForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
     "InternS1ProForConditionalGeneration"},
    {{nullptr, "Qwen3_5ForCausalLM"},
     "Qwen3_5ForConditionalGeneration MiniCPMV4_6ForConditionalGeneration ClefFlashForJointSchema "
     "MiniCPMV4_7ForConditionalGeneration MiniCPMOcrForConditionalGeneration ColQwen3_5"},
    {{nullptr, "Qwen3_5MoeForCausalLM"},
     "Qwen3_5MoeForConditionalGeneration InternS2PreviewForConditionalGeneration"},
    {{nullptr, "CohereCompassForCausalLM"}, "CohereCompassForConditionalGeneration"},
    {{nullptr, "Cosmos3EdgeForCausalLM"}, "Cosmos3EdgeForConditionalGeneration"},
    {{nullptr, "Ernie4_5ForCausalLM"}, "PaddleOCRVLForConditionalGeneration"},
    {{nullptr, "Ernie4_5_VLMoeForCausalLM"}, "Ernie4_5_VLMoeForConditionalGeneration"},
    {{nullptr, "Exaone4ForCausalLM"}, "Exaone4_5_ForConditionalGeneration"},
    {{nullptr, "Gemma3ForCausalLM"}, "Gemma3ForConditionalGeneration"},
    {{nullptr, "Gemma3nForCausalLM"}, "Gemma3nForConditionalGeneration"},
    {{nullptr, "Gemma4ForCausalLM"},
     "Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration "
     "DiffusionGemmaForBlockDiffusion"},
    {{nullptr, "Glm4ForCausalLM"}, "Glm4vForConditionalGeneration GlmOcrForConditionalGeneration"},
    {{nullptr, "Glm4MoeForCausalLM"}, "Glm4vMoeForConditionalGeneration"},
    {{nullptr, "Granite4VisionLLMForCausalLM"}, "Granite4VisionForConditionalGeneration"},
    {{nullptr, "DeepseekV2ForCausalLM"},
     "KimiVLForConditionalGeneration KimiK25ForConditionalGeneration"},
    {{nullptr, "KimiLinearForCausalLM"}, "KimiK3ForConditionalGeneration"},
    {{nullptr, "BailingMoeV3ForCausalLM"}, "BailingMoeV3VLForConditionalGeneration"},
    {{nullptr, "Lfm2ForCausalLM"}, "Lfm2VlForConditionalGeneration"},
    {{nullptr, "Llama4ForCausalLM"}, "Llama4ForConditionalGeneration"},
    {{nullptr, "MiMoV2FlashForCausalLM"}, "MiMoV2OmniForCausalLM"},
    {{nullptr, "MiniMaxM3SparseForCausalLM"}, "MiniMaxM3SparseForConditionalGeneration"},
    {{nullptr, "Molmo2TextModel"}, "Molmo2ForConditionalGeneration"},
    {{nullptr, "MuseGlimmerForCausalLM"}, "MuseGlimmerForConditionalGeneration"},
    {{nullptr, "NemotronHForCausalLM"},
     "NemotronH_Nano_VL_V2 NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 "
     "NemotronH_Omni_Reasoning_V3"},
    {{nullptr, "PanguEmbeddedForCausalLM"}, "OpenPanguVLForConditionalGeneration"},
    {{nullptr, "Step3TextForCausalLM"}, "Step3VLForConditionalGeneration"},
    {{nullptr, "Step3p5ForCausalLM"}, "Step3p7ForConditionalGeneration"},
    {{nullptr, "Qwen4ExpForCausalLM"}, "Qwen4ExpForConditionalGeneration"},
    {{nullptr, "LlamaForCausalLM"}, "MiniCPMV"},
    {{nullptr, "Qwen3ForCausalLM"}, "MiniCPMO StepVLForConditionalGeneration"},
};

}  // namespace

const Architecture* find_architecture(std::string_view name) {
  static const auto table = [] {
    std::map<std::string_view, const Architecture*> architectures;
    for (const Family& family : kFamilies)
      for (std::size_t begin = 0; begin < family.names.size();) {
        const std::size_t end = std::min(family.names.find(' ', begin), family.names.size());
        architectures[family.names.substr(begin, end - begin)] = &family.architecture;
        begin = end + 1;
      }
    return architectures;
  }();
  const auto at = table.find(name);
  return at == table.end() ? nullptr : at->second;
}

}  // namespace lockstep
