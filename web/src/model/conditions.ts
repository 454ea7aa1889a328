/** The current problems of a job or a node, as titles and sentences. Pure. */
import type { Condition } from '../contract'
import { capitalized, sentence, words } from './format'

/** Return one line for each condition. An older server sends no conditions. */
export const conditionLines = (conditions: readonly Condition[] | undefined) =>
  (conditions ?? []).map(({ Type, Message, NodeId }) => ({
    key: `${NodeId ?? ''} ${Type} ${Message}`,
    title: capitalized(NodeId === undefined ? words(Type) : `${words(Type)} on ${NodeId}`),
    text: sentence(Message),
  }))
