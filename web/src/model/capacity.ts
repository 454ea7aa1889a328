/** A job's wait for instances that AWS does not launch, read from the job's reason. Pure. */
import type { Fleet } from '../contract'
import { ACT, STATE } from '../words/job'
import { clock, nearest, sentence, soon } from './format'

export interface CapacityWait {
  /** "1 p5.48xlarge", or "1 node" if the type is unknown. Absent if the reason has no number. */
  need?: string
  zone?: string
  /** AWS has no capacity. false: AWS refused the launch for another reason. */
  isShort: boolean
  /** Unix seconds of the next attempt. */
  retryAt: number
  /** "in 12 s", or "now". */
  when: string
  /** AWS's own message. */
  message: string
}

/** The form in which `waiting_words` (control_plane/core/capacity.py) and `core/job/view.py` write a reason. */
const RETRIES = /^(?:([^:]*): )?(.*); Everstep retries at (\d\d:\d\d:\d\d) UTC/s
const NEED = /waits for (\d+) nodes?$/
const SHORTAGE = /sufficient .*capacity|InsufficientInstanceCapacity/i

export function capacityWait(reason: string, now: number, fleet?: Partial<Fleet>): CapacityWait | undefined {
  const match = RETRIES.exec(reason)
  if (match === null) return undefined
  const [, before = '', message = '', time = ''] = match
  const retryAt = nearest(time, now)
  const nodes = NEED.exec(before)?.[1]
  const noun = fleet?.InstanceType ?? (nodes === '1' ? 'node' : 'nodes')
  return {
    need: nodes === undefined ? undefined : `${nodes} ${noun}`,
    zone: fleet?.AvailabilityZone,
    isShort: SHORTAGE.test(message),
    retryAt,
    when: retryAt <= now + 1 ? STATE.nextAttemptNow : soon(retryAt, now),
    message: sentence(message),
  }
}

/** Return the wait in sentences: what AWS lacks, when Everstep tries again, and AWS's own message. */
export function capacityWords(wait: CapacityWait, fleet?: Partial<Fleet>): string {
  const words = ACT.shortage
  const lack = words.text(fleet?.InstanceType ?? words.type, wait.zone ?? words.zone)
  const attempt = words.attempt(wait.when, clock(wait.retryAt))
  return [wait.isShort ? lack : words.none, attempt, words.said(wait.message)].join(' ')
}
