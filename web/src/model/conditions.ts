/** What is wrong now with a job or a node, as lines of text. Pure. */
import type { Condition } from '../contract'
import { sentence, words } from './format'

export interface Line {
  key: string
  title: string
  text: string
}

/** One line for each condition; answers of an older server have none. */
export const conditionLines = (conditions: readonly Condition[] | undefined): Line[] =>
  (conditions ?? []).map(({ Type, Message, NodeId }) => ({ key: `${NodeId ?? ''} ${Type} ${Message}`, title: capital(NodeId === undefined ? words(Type) : `${words(Type)} on ${NodeId}`), text: sentence(Message) }))

const capital = (text: string): string => text.slice(0, 1).toUpperCase() + text.slice(1)
