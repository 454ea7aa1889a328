/** The current problems of a job or a node, as titles and sentences. Pure. */
import type { Condition } from '../contract'
import { sentence, words } from './format'

export interface ConditionLine {
  key: string
  title: string
  text: string
}

/** Return one line for each condition. An older server sends no conditions. */
export const conditionLines = (conditions: readonly Condition[] | undefined): ConditionLine[] =>
  (conditions ?? []).map(({ Type, Message, NodeId }) => ({
    key: `${NodeId ?? ''} ${Type} ${Message}`,
    title: capitalized(NodeId === undefined ? words(Type) : `${words(Type)} on ${NodeId}`),
    text: sentence(Message),
  }))

const capitalized = (text: string): string => text.slice(0, 1).toUpperCase() + text.slice(1)
